"""What it changes to measure BatchNorm's statistics anew at the end, in runs that were judged before and after."""

from __future__ import annotations

from smoothout.lab.config import Config
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import Verdict
from smoothout.lab.report.groups import FEWEST_RUNS, difference, sense_of


def verdicts_on(rows: dict[str, Config], records: Records) -> tuple[Verdict, ...]:
    """By name, of those configurations that have such runs."""
    found = (_verdict(name, config, records) for name, config in rows.items())
    return tuple(verdict for verdict in found if verdict is not None)


def _verdict(name: str, config: Config, records: Records) -> Verdict | None:
    group = records.group(config)
    both = [] if group is None else [(r.as_trained, r.last) for r in group.records if r.as_trained is not None]
    if not both:
        return None
    claim = f"{name}: statistics measured anew raise the accuracy of the last epoch"
    before, after = [each["test_accuracy"] for each, _ in both], [last.test_accuracy for _, last in both]
    change = difference(before, after, paired=True)
    if change is None or change.n < FEWEST_RUNS:
        told = ", ".join(f"{100 * (y - x):+.2f}" for x, y in zip(before, after))
        return Verdict(claim, sense_of(change), f"{told} points (n = {len(both)})")
    return Verdict(claim, sense_of(change), change.in_points())
