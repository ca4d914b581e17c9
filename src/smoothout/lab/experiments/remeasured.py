"""What it changes to measure BatchNorm's statistics anew at the end, in runs that were judged before and after."""

from __future__ import annotations

from collections.abc import Mapping

from smoothout.lab.config import Config
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import Verdict
from smoothout.lab.groups import FEWEST_RUNS, difference, sense_of

CLAIM = "statistics measured anew raise the accuracy of the last epoch"


def verdicts_on(rows: Mapping[str, Config], records: Records) -> tuple[Verdict, ...]:
    """By name, of those configurations that have such runs."""
    found = ((name, _changes(config, records)) for name, config in rows.items())
    return tuple(_verdict(name, *changes) for name, changes in found if changes)


def listed(name: str, rows: Mapping[str, Config], records: Records) -> tuple[Verdict, ...]:
    """The changes of several settings one by one. They do not repeat each other, so nothing is concluded."""
    told = [
        f"{each} {100 * (after - before):+.2f}"
        for each, config in rows.items()
        for before, after in _changes(config, records)
    ]
    return (Verdict(f"{name}: {CLAIM}", "run by run", "; ".join(told)),) if told else ()


def _changes(config: Config, records: Records) -> list[tuple[float, float]]:
    """Accuracies before and after, of runs that were judged both ways."""
    group = records.group(config)
    runs = [] if group is None else group.records
    return [(run.as_trained["test_accuracy"], run.last.test_accuracy) for run in runs if run.as_trained is not None]


def _verdict(name: str, *changes: tuple[float, float]) -> Verdict:
    claim = f"{name}: {CLAIM}"
    before, after = zip(*changes)
    change = difference(before, after, paired=True)
    if change is None or change.n < FEWEST_RUNS:
        told = ", ".join(f"{100 * (y - x):+.2f}" for x, y in changes)
        return Verdict(claim, sense_of(change), f"{told} points (n = {len(changes)})")
    return Verdict(claim, sense_of(change), change.in_points())
