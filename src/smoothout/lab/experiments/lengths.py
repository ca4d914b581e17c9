"""Whether a shorter run of ResNet44 ranks strengths and schedules as the row's 400 epochs do, on held-out images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from scipy import stats

from smoothout.lab.experiments.choice import (
    DEEP_EPOCHS,
    HELD_OUT,
    OURS,
    chosen_warm_up,
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
STRICT = 0.8  # of τ: at most one pair of candidates in ten is ranked the other way round


def lengths(setting: Setting) -> Experiment:
    setting = replace(setting, preset="ours")  # whichever is asked for: no other chooses
    rows: list[Row] = []
    for epochs in SHORT:
        baseline = held_out(setting, RESNET44, RESNET44.large, "plain", epochs=epochs, lr_warmup=chosen_warm_up())
        rows.append(Row(label(RESNET44, RESNET44.large, "plain", f", {epochs} epochs"), baseline))
        for row in _candidates(setting, epochs):
            rows.append(Row(f"{row.label}, {epochs} epochs", row.config, versus=row.versus))
    return Experiment(
        "lengths",
        "ResNet44: whether shorter runs rank strengths and schedules alike",
        tuple(rows),
        notes=(f"Accuracies on {HELD_OUT:,} held-out training images; those of {DEEP_EPOCHS} epochs are in `choice`.",),
        judge=partial(_judge, setting),
    )


def _candidates(setting: Setting, epochs: int) -> list[Row]:
    """Of both methods, with the warm-up that the baseline chose."""
    return [row for method in OURS for row in deep_candidates(setting, method, chosen_warm_up(), epochs)]


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
    alike = "holds" if tau >= STRICT else "in part: an order in common, with exceptions"
    verdict = (alike if tau > 0 else "the opposite order") if p < SURE else "no order in common is shown"
    gains = ", ".join(f"{short:+.2f} and {long:+.2f}" for short, long in known)
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
    """In points, over the seeds that both and their baselines have; None without one, or where a run diverged."""
    configs = [config for row in (short, long) for config in (row.config, row.versus) if config is not None]
    groups = [records.group(config) for config in configs]
    known = [group for group in groups if group is not None]
    if len(known) < len(groups) or any(found.failure for config in configs for found in records.seeds_of(config)):
        return None
    seeds = set.intersection(*(set(group.seeds) for group in known))
    if not seeds:
        return None
    after, before, later, earlier = (mean_accuracy(group, seeds) for group in known)
    return 100 * (after - before), 100 * (later - earlier)
