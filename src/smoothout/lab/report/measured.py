"""What `smoothout measure` left in the run folders, as far as runs can be compared by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smoothout.lab import measurements
from smoothout.lab.groups import Group, Sample
from smoothout.lab.measurements import Measurement
from smoothout.lab.report.names import in_words
from smoothout.measure import Curvature, Sensitivity, Sharpness

SENSITIVITY, SHARPNESS, CURVATURE = "sensitivity-train", "sharpness-train", "curvature-train"


def of_group(group: Group, name: str) -> list[Measurement]:
    """The measurements of this name that its runs have."""
    there = [run.path for run in group.runs if (run.path / measurements.FOLDER / f"{name}.json").exists()]
    return [measurements.load(path, name) for path in there]


# ---- loss under noise ------------------------------------------------------------------------------------------------


def loss_rises(groups: Sequence[Group]) -> list[Sample | None]:
    """C̄(w; a) − C(w) at the strongest noise of the grid, for every run of each group.

    None for a group of which not all runs were measured; None for all groups where runs were measured in different
    ways, or not both with noise and without.
    """
    by_group = [of_group(group, SENSITIVITY) for group in groups]
    every = [each for curves in by_group for each in curves]
    if _settings_that_differ(every) or not all(map(_has_both_ends, every)):
        return [None] * len(groups)
    return [
        Sample(tuple(_rise(each.result) for each in curves)) if curves and len(curves) == len(group.runs) else None
        for group, curves in zip(groups, by_group)
    ]


def rise_in_words(groups: Sequence[Group]) -> str:
    """A note: how the rise was measured, or why it is not shown; empty where no run has it."""
    every = [each for group in groups for each in of_group(group, SENSITIVITY)]
    if not every:
        return ""
    rises = loss_rises(groups)
    if any(rises):
        dash = "" if all(rises) else " –: `smoothout measure sensitivity` has yet to measure all runs of the row."
        return f"† {_how(every[0].result)}{dash}"
    differ = _settings_that_differ(every)
    if not differ and all(map(_has_both_ends, every)):
        runs = sum(len(group.runs) for group in groups)
        return f"Loss rise under noise is left out: only {len(every)} of {runs} runs have it measured."
    reason = f"the runs were measured in different ways ({_told(differ)})" if differ else "it needs strength 0 and more"
    mends = set(differ) != {"images"}  # of other data, or of fewer images, there is no other number
    remedy = "; `smoothout measure sensitivity RUNS` makes them alike" if mends else ""
    return f"Loss rise under noise is left out: {reason}{remedy}."


def _has_both_ends(each: Measurement) -> bool:
    return 0.0 in each.result.strengths and max(each.result.strengths) > 0.0


def _rise(curve: Sensitivity) -> float:
    losses = dict(zip(curve.strengths, curve.losses))
    return losses[max(losses)] - losses[0.0]


def _how(curve: Sensitivity) -> str:
    relative = " times the norm of its filter" if curve.scale == "filter" else ""
    return (
        f"How much the training loss rises when every weight is pushed by {curve.noise} noise of strength "
        f"{max(curve.strengths):g}{relative}, the mean of {curve.draws} pushes, the same for every network: a small "
        "rise is a flat minimum."
    )


# ---- sharpness and curvature -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A measurement of all runs shown: a cell a group, and what it is. Without cells, why it is left out."""

    header: str
    cells: tuple[str, ...]
    note: str


def columns(groups: Sequence[Group]) -> list[Column]:
    """Sharpness and the largest eigenvalue, of whichever some run has a measurement on its training images."""
    found = (_column(groups, SHARPNESS, "sharpness‡"), _column(groups, CURVATURE, "top eigenvalue§"))
    return [column for column in found if column is not None]


def _column(groups: Sequence[Group], name: str, header: str) -> Column | None:
    by_group = [of_group(group, name) for group in groups]
    every = [each for found in by_group for each in found]
    if not every:
        return None
    left_out, runs = f"{header[:-1].capitalize()} is left out", sum(len(group.runs) for group in groups)
    differ = _settings_that_differ(every)
    if len(every) < runs:
        return Column(header, (), f"{left_out}: only {len(every)} of {runs} runs have it measured.")
    if differ:
        return Column(header, (), f"{left_out}: the runs were measured in different ways ({_told(differ)}).")
    tell, note = (_sharpness, _SHARPNESS_NOTE) if name == SHARPNESS else (_eigenvalue, _EIGENVALUE_NOTE)
    settings = every[0].settings
    return Column(header, tuple(tell([each.result for each in found]) for found in by_group), note.format(**settings))


_SHARPNESS_NOTE = (
    "‡ How far the training loss can rise in a box of ε = {epsilon:g} around the weights, 100·(max f − f)/(1 + f), the "
    "maximum of {restarts} starts; in brackets, of how many runs the search converged."
)
_EIGENVALUE_NOTE = (
    "§ The largest eigenvalue of the training loss's Hessian; in brackets, if not of all, of how many runs it "
    "converged."
)


def _sharpness(results: Sequence[Sharpness]) -> str:
    converged = sum(result.converged for result in results)
    return f"{_mean([result.value for result in results])} % ({converged} of {len(results)})"


def _eigenvalue(results: Sequence[Curvature]) -> str:
    converged = sum(result.converged for result in results)
    told = _mean([result.eigenvalues[0] for result in results])
    return told if converged == len(results) else f"{told} ({converged} of {len(results)})"


def _mean(values: Sequence[float]) -> str:
    return number(Sample(tuple(values)))


def number(sample: Sample) -> str:
    """0.0123 ± 0.0045: three digits of the mean, and the deviation to the same place."""
    if sample.sd is None:
        return amount(sample.mean, 3)
    if not 1e-6 < abs(sample.mean) < math.inf:
        return f"{sample.mean:.3g} ± {sample.sd:.1g}"
    places = max(0, 2 - math.floor(math.log10(abs(sample.mean))))
    return f"{sample.mean:,.{places}f} ± {sample.sd:,.{places}f}"


def amount(value: float, digits: int) -> str:
    """So many digits, but all those before the point."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


# ---- alike or not ----------------------------------------------------------------------------------------------------


def _settings_that_differ(every: Sequence[Measurement]) -> dict[str, list[Any]]:
    """The settings that are not the same in all, with their values."""
    found: dict[str, list[Any]] = {}
    for each in every:
        for name, value in each.settings.items():
            values = found.setdefault(name, [])
            values += [] if value in values else [value]
    return {name: values for name, values in found.items() if len(values) > 1}


def _told(differ: dict[str, list[Any]]) -> str:
    return ", ".join(f"{name} {' and '.join(map(in_words, values))}" for name, values in differ.items())
