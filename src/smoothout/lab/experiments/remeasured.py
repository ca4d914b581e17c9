"""What it changes to measure BatchNorm's statistics anew at the end, in runs that were judged before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from smoothout.lab.config import Config
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import Verdict
from smoothout.lab.report.groups import FEWEST_RUNS, difference, sense_of


def verdicts_on(rows: Mapping[str, Sequence[Config]], records: Records) -> tuple[Verdict, ...]:
    """By name, over all runs of these configurations, where there are such runs."""
    found = (_verdict(name, configs, records) for name, configs in rows.items())
    return tuple(verdict for verdict in found if verdict is not None)


def _verdict(name: str, configs: Sequence[Config], records: Records) -> Verdict | None:
    groups = [group for config in configs if (group := records.group(config)) is not None]
    runs = [record for group in groups for record in group.records]
    both = [(run.as_trained, run.last) for run in runs if run.as_trained is not None]
    if not both:
        return None
    claim = f"{name}: statistics measured anew raise the accuracy of the last epoch"
    before, after = [each["test_accuracy"] for each, _ in both], [last.test_accuracy for _, last in both]
    change = difference(before, after, paired=True)
    told = ", ".join(f"{100 * (y - x):+.2f}" for x, y in zip(before, after))
    if change is None or change.n < FEWEST_RUNS:
        return Verdict(claim, sense_of(change), f"{told} points (n = {len(both)})")
    return Verdict(claim, sense_of(change), f"{change.in_points()}: {told}")
