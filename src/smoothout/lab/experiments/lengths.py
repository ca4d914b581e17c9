"""Whether a shorter run of ResNet44 ranks strengths as the row's 400 epochs do, on held-out images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from scipy import stats

from smoothout.lab.experiments.choice import (
    DEEP_EPOCHS,
    HELD_OUT,
    OURS,
    UNCUT,
    deep_candidates,
    held_out,
    mean_accuracy,
)
from smoothout.lab.experiments.networks import RESNET44, label
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import NOT_MEASURED, Experiment, Row, Setting, Verdict

SHORT = (100,)
FEWEST = 5  # pairs, to speak of an order
SURE = 0.05


def lengths(setting: Setting) -> Experiment:
    setting = replace(setting, preset="ours")  # whichever is asked for: no other chooses
    rows: list[Row] = []
    for epochs in SHORT:
        baseline = held_out(setting, RESNET44, RESNET44.large, "plain", epochs=epochs, **UNCUT.settings)
        rows.append(Row(label(RESNET44, RESNET44.large, "plain", f", {epochs} epochs"), baseline))
        for row in _candidates(setting, epochs):
            rows.append(Row(f"{row.label}, {epochs} epochs", row.config, versus=row.versus))
    return Experiment(
        "lengths",
        "ResNet44: whether shorter runs rank strengths alike",
        tuple(rows),
        notes=(
            f"Accuracies on {HELD_OUT:,} held-out training images. Those of {DEEP_EPOCHS} epochs are in `choice`: ask "
            "for its seeds (--seed 100).",
        ),
        judge=partial(_judge, setting),
    )


def _candidates(setting: Setting, epochs: int) -> list[Row]:
    """Of both methods, in the regime with strengths from the paper's to four times as much."""
    return [row for method in OURS for row in deep_candidates(setting, method, UNCUT, epochs)]


def _judge(setting: Setting, records: Records) -> tuple[Verdict, ...]:
    return tuple(_verdict(setting, records, epochs) for epochs in SHORT)


def _verdict(setting: Setting, records: Records, epochs: int) -> Verdict:
    claim = f"{epochs} epochs rank the candidates as {DEEP_EPOCHS} do"
    pairs = [
        _gains(short, long, records)
        for short, long in zip(_candidates(setting, epochs), _candidates(setting, DEEP_EPOCHS), strict=True)
    ]
    known = [pair for pair in pairs if pair is not None]
    if len(known) < FEWEST:
        return Verdict(claim, NOT_MEASURED, f"{len(known)} of {len(pairs)} candidates have both")
    tau, p = stats.kendalltau(*zip(*known))
    verdict = ("holds" if tau > 0 else "the opposite order") if p < SURE else "no order in common is shown"
    gains = ", ".join(" and ".join(map(_in_points, pair)) for pair in known)
    evidence = (
        f"Kendall's τ {tau:+.2f} (p = {p:.2g}) over {len(known)} of {len(pairs)} candidates; the best of {epochs} "
        f"epochs is {_place_of_best(known)} at {DEEP_EPOCHS}; points against the baseline: {gains}"
    )
    return Verdict(claim, verdict, evidence)


def _place_of_best(gains: Sequence[tuple[float, float]]) -> str:
    """Where the long run puts the candidate that the short one would choose."""
    _, later = max(gains)
    return f"number {1 + sum(long > later for _, long in gains)}"


def _gains(short: Row, long: Row, records: Records) -> tuple[float, float] | None:
    """In points, over the seeds that all of these runs have, −∞ for one that diverged; None without such a seed."""
    ended = [row for row in (short, long) if not records.diverged(row.config)]
    groups = [records.group(config) for row in ended for config in (row.config, row.versus) if config is not None]
    known = [group for group in groups if group is not None]
    seeds = set.intersection(*(set(group.seeds) for group in known)) if known else set()
    if len(known) < len(groups) or not seeds:
        return None
    means = iter([100 * mean_accuracy(group, seeds) for group in known])
    first, second = (next(means) - next(means) if row in ended else -math.inf for row in (short, long))
    return first, second


def _in_points(gain: float) -> str:
    return f"{gain:+.2f}" if math.isfinite(gain) else "diverged"
