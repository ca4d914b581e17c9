"""Verdicts on how two configurations differ, from the runs that there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from smoothout.lab.config import Config
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import NOT_MEASURED, Verdict
from smoothout.lab.groups import Group, compare, compare_in_study, sense_of
from smoothout.lab.runs import Record


def on_difference(
    claim: str,
    before: Config,
    after: Config,
    records: Records,
    value: Callable[[Record], float],
    more: str = "holds",
    less: str = "the opposite",
) -> Verdict:
    """A word for more, for less or for neither; none where a run diverged."""
    groups = groups_of((before, after), records)
    if isinstance(groups, str):
        return Verdict(claim, groups, "")
    found = compare(groups[0], groups[1], value)
    return Verdict(claim, sense_of(found, more, less), "" if found is None else found.in_points())


def on_contrast(
    claim: str,
    plus: Sequence[Config],
    minus: Sequence[Config],
    records: Records,
    value: Callable[[Record], float],
    study: Sequence[Group],
    more: str = "holds",
    less: str = "the opposite",
) -> Verdict:
    """The same for a sum of means minus another, within a study whose rows have few runs each."""
    groups = groups_of((*plus, *minus), records)
    if isinstance(groups, str):
        return Verdict(claim, groups, "")
    found = compare_in_study(groups[: len(plus)], groups[len(plus) :], value, study)
    return Verdict(claim, sense_of(found, more, less), "" if found is None else found.in_points())


def groups_of(configs: Sequence[Config], records: Records) -> list[Group] | str:
    """The runs of each; in a word why they cannot be compared."""
    lost = records.diverged(*configs)
    if lost:
        return f"{lost} runs diverged"
    groups = [group for config in configs if (group := records.group(config)) is not None]
    return groups if len(groups) == len(configs) else NOT_MEASURED
