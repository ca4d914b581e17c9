"""Whether a shorter run of ResNet44 ranks settings as the row's 400 epochs do, and when those have decided."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from statistics import fmean

from smoothout.lab.config import Config
from smoothout.lab.experiments.choice import (
    DECIDED_BY,
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
from smoothout.lab.groups import Sample, difference
from smoothout.lab.runs import Run

SHORT = 100
WINDOW = 10  # epochs, whose mean accuracy is a run's: that of one is partly luck under noise
FEWEST = 5  # pairs, to speak of an order
SURE = 0.05


def lengths(setting: Setting) -> Experiment:
    setting = replace(setting, preset="ours")  # whichever is asked for: no other chooses
    more = f", {SHORT} epochs"
    baseline = held_out(setting, RESNET44, RESNET44.large, "plain", epochs=SHORT, **UNCUT.settings)
    rows = [Row(label(RESNET44, RESNET44.large, "plain", more), baseline)]
    rows += [Row(row.label + more, row.config, versus=row.versus) for row in _candidates(setting, SHORT)]
    return Experiment(
        "lengths",
        "ResNet44: whether shorter runs rank settings alike",
        tuple(rows),
        notes=(
            f"Accuracies on {HELD_OUT:,} held-out training images. Those of {DEEP_EPOCHS} epochs are in `choice`: ask "
            "for its seeds (--seed 100).",
            f"The verdicts on the first {DECIDED_BY} epochs are from all finished runs of {DEEP_EPOCHS} epochs with a "
            f"constant strength, whatever experiment made them: mean accuracies of the {WINDOW} epochs up to "
            f"{DECIDED_BY} and up to {DEEP_EPOCHS - 1}, as trained. The last epoch by itself is partly luck, and may "
            "have been judged with statistics measured anew. τ is Kendall's; there only runs of one preset and one "
            "warm-up are compared with each other, for those of a weak one and a good one are told apart at once.",
        ),
        judge=partial(_judge, setting),
    )


def _candidates(setting: Setting, epochs: int) -> list[Row]:
    """Candidates of both methods, in the regime whose strengths go from the paper's to four times as much."""
    return [row for method in OURS for row in deep_candidates(setting, method, UNCUT, epochs=epochs)]


def _judge(setting: Setting, records: Records) -> tuple[Verdict, ...]:
    return (
        _shorter_runs(setting, records),
        *(_decided_early(records, on_held_out) for on_held_out in (True, False)),
    )


def _decided_early(records: Records, on_held_out: bool) -> Verdict:
    judged_on = "held-out" if on_held_out else "test"
    claim = f"The first {DECIDED_BY} of {DEEP_EPOCHS} epochs rank runs as all of them do, {judged_on} images"
    configs = dict.fromkeys(found.run.config.with_seed(0) for found in records.all())
    groups = [group for config in configs if (group := records.group(config)) is not None]
    runs = [run for group in groups for run in group.runs if _is_whole(run)]
    runs = [run for run in runs if bool(run.config.hold_out) == on_held_out]
    if len(runs) < FEWEST:
        return Verdict(claim, NOT_MEASURED, f"{len(runs)} runs")
    early, late = ([_mean_accuracy_up_to(epoch, run) for run in runs] for epoch in (DECIDED_BY, DEEP_EPOCHS - 1))
    changes: dict[bool, list[float]] = {True: [], False: []}  # by whether there was noise
    for run, before, after in zip(runs, early, late):
        changes[run.config.method != "plain"].append(after - before)
    regimes = [(run.config.preset, run.config.lr_warmup) for run in runs]
    verdict, order = _in_common(early, late, regimes)
    _, with_the_last = _in_common(early, [run.metrics[-1].test_accuracy for run in runs], regimes)
    of_all, more = Sample((*changes[True], *changes[False])), difference(changes[False], changes[True], paired=False)
    spread = "" if of_all.sd is None else f" ± {100 * of_all.sd:.2f}"
    of_noise = "" if more is None else f", by {more.in_points()} more with noise than without"
    evidence = (
        f"{order} over {len(runs)} runs, with the last epoch by itself {with_the_last}; "
        f"accuracy then changes by {100 * of_all.mean:+.2f}{spread} points{of_noise}"
    )
    return Verdict(claim, verdict, evidence)


def _is_whole(run: Run) -> bool:
    """Whether it is one of ResNet44's at the row's length, to the end, with a strength that did not change."""
    config = run.config
    place = config.model, config.dataset, config.batch_size, config.strength_schedule
    ours = RESNET44.model, RESNET44.dataset, RESNET44.large, Config.strength_schedule
    return run.record is not None and place == ours and len(run.metrics) == config.epochs == DEEP_EPOCHS


def _mean_accuracy_up_to(epoch: int, run: Run) -> float:
    return fmean(metrics.test_accuracy for metrics in run.metrics[epoch - WINDOW : epoch])


def _in_common(
    first: Sequence[float], second: Sequence[float], strata: Sequence[Hashable] | None = None
) -> tuple[str, str]:
    """Whether two figures of the same runs order them alike, in a word, and by how much.

    Args:
        strata: only runs of the same one are compared with each other.
    """
    tau, p = kendall(first, second, strata or [None] * len(first))
    verdict = ("holds" if tau > 0 else "the opposite order") if p < SURE else "no order in common is shown"
    return verdict, f"τ {tau:+.2f} (p = {p:.2g})"


def kendall(first: Sequence[float], second: Sequence[float], strata: Sequence[Hashable]) -> tuple[float, float]:
    """Kendall's τ over the pairs within strata, and its p by the normal law (Hirsch, Slack and Smith, 1982).

    A tie counts as half in order: p is then a little too large.
    """
    members: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)
    for x, y, stratum in zip(first, second, strata, strict=True):
        members[stratum].append((x, y))
    score, pairs, variance = 0, 0, 0.0
    for values in members.values():
        n = len(values)
        score += sum(_sign((x1 - x2) * (y1 - y2)) for (x1, y1), (x2, y2) in combinations(values, 2))
        pairs += n * (n - 1) // 2
        variance += n * (n - 1) * (2 * n + 5) / 18
    if not pairs:
        return 0.0, 1.0
    z = max(abs(score) - 1, 0) / math.sqrt(variance)  # less one: scores are whole numbers
    return score / pairs, math.erfc(z / math.sqrt(2))


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _shorter_runs(setting: Setting, records: Records) -> Verdict:
    claim = f"{SHORT} epochs rank the candidates as {DEEP_EPOCHS} do"
    pairs = [
        _gains(short, long, records)
        for short, long in zip(_candidates(setting, SHORT), _candidates(setting, DEEP_EPOCHS), strict=True)
    ]
    known = [pair for pair in pairs if pair is not None]
    if len(known) < FEWEST:
        return Verdict(claim, NOT_MEASURED, f"{len(known)} of {len(pairs)} candidates have both")
    verdict, order = _in_common(*zip(*known))
    gains = ", ".join(" and ".join(map(_in_points, pair)) for pair in known)
    evidence = (
        f"{order} over {len(known)} of {len(pairs)} candidates; the best of {SHORT} "
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
    common = records.in_common([each for row in ended for each in (row.config, row.versus) if each is not None])
    if common is None:
        return None
    groups, seeds = common
    means = iter([100 * mean_accuracy(group, seeds) for group in groups])
    first, second = (next(means) - next(means) if row in ended else -math.inf for row in (short, long))
    return first, second


def _in_points(gain: float) -> str:
    return f"{gain:+.2f}" if math.isfinite(gain) else "diverged"
