"""The goal for ResNet44 on CIFAR-10: half a point over our own baseline in the last epoch, at no more GPU time."""

from __future__ import annotations

import math

from smoothout.lab.config import Config
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.verdicts import groups_of
from smoothout.lab.experiments.vocabulary import NOT_MEASURED, Verdict
from smoothout.lab.groups import (
    FEWEST_RUNS,
    Difference,
    Group,
    compare,
    difference,
    has_its_own_seconds,
    training_seconds,
)

POINTS = 0.5
MOST_TIME = 1.01  # of the baseline's: clocks agree no better


def verdict_on(name: str, baseline: Config, config: Config, records: Records) -> Verdict:
    """Whether runs of `config` reach it: by the mean, with an interval that excludes zero, and none diverged."""
    claim = f"{name}: {POINTS} points over the baseline in the last epoch, at no more GPU time"
    groups = groups_of((baseline, config), records)
    if isinstance(groups, str):
        return Verdict(claim, groups if groups == NOT_MEASURED else f"not reached: {groups}", "")
    base, group = groups
    gain = compare(base, group, lambda record: record.last.test_accuracy)
    if gain is None or gain.n < FEWEST_RUNS:
        return Verdict(claim, "too few runs", "" if gain is None else gain.in_points())
    time = _time(base, group)
    evidence = f"{gain.in_points()}; {'GPU times that cannot be compared' if time is None else _in_words(time)}"
    return Verdict(claim, _judged(gain, time), evidence)


def _judged(gain: Difference, time: Difference | None) -> str:
    if not gain.is_shown:
        return "not reached: no difference measured"
    if gain.mean < 0:
        return "not reached: it loses"
    if 100 * gain.mean < POINTS:
        return "not reached: a smaller gain"
    if time is None:
        return "the gain is reached, its time is not known"
    if math.exp(time.mean) <= MOST_TIME:
        return "reached"
    # Machines of one kind differ by a few per cent, and one method may have met the slower ones:
    # benchmarks/methods_in_turns.py has an epoch of each in turns.
    return "not reached: it takes more time" if time.low > 0 else "the gain is reached, its time is not decided"


def _time(base: Group, group: Group) -> Difference | None:
    """The difference of the logarithms of time; None unless all ran on the same device, equally many at once."""
    every = (*base.records, *group.records)
    alike = len({(record.provenance.device, record.provenance.together) for record in every}) == 1
    if not alike or not all(map(has_its_own_seconds, every)):
        return None
    logs = [[math.log(training_seconds(run)) for run in each.runs] for each in (base, group)]
    return difference(logs[0], logs[1], paired=False)


def _in_words(time: Difference) -> str:
    low, middle, high = (math.exp(x) for x in (time.low, time.mean, time.high))
    return f"GPU time × {middle:.3f} [{low:.3f}, {high:.3f}]"
