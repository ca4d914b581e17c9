"""Claims of the paper's text, each a small experiment on C1 with a verdict from the records.

A gain is claimed only with three runs a side and an interval that excludes zero (`Difference.is_shown`), and nothing of
configurations of which a run diverged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import fmean

from scipy.special import gammaincinv

from smoothout.lab.config import Config
from smoothout.lab.experiments.choice import FACTORS, USUAL, held_out, robustness_rows
from smoothout.lab.experiments.measuring import sensitivity, sharpness
from smoothout.lab.experiments.networks import C1, configure, label
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.table1 import rows_of
from smoothout.lab.experiments.verdicts import groups_of
from smoothout.lab.experiments.vocabulary import NOT_MEASURED, Experiment, Row, Setting, Verdict
from smoothout.lab.groups import FEWEST_RUNS, Difference, Sample, compare, difference, pairs, reported, sense_of

PAPER_SDS = {
    ("plain", "small"): 0.33,
    ("smoothout", "small"): 0.12,
    ("plain", "large"): 0.24,
    ("smoothout", "large"): 0.31,
}
Judge = Callable[[Setting, Records], Verdict]


def claims(setting: Setting) -> Experiment:
    return Experiment(
        "claims",
        "Claims of the text, on C1",
        (*rows_of(setting, C1), *_robustness(setting), *_dropout(setting), *_swa(setting)),
        judge=partial(_judge, setting),
    )


def _judge(setting: Setting, records: Records) -> tuple[Verdict, ...]:
    return tuple(judge(setting, records) for judge in JUDGES)


def _robustness(setting: Setting) -> list[Row]:
    """The rows that `ours` chooses from: judged on held-out images, whatever the preset."""
    setting = replace(setting, preset="ours")
    rows: list[Row] = []
    for batch_size in (C1.small, C1.large):
        baseline = held_out(setting, C1, batch_size, "plain")
        rows.append(Row(label(C1, batch_size, "plain", ", held out"), baseline))
        rows += robustness_rows(setting, C1, batch_size, "smoothout")
    return [replace(row, note="held-out images, preset ours") for row in rows]


def _dropout(setting: Setting) -> list[Row]:
    rows = [
        Row(label(C1, batch_size, "plain", ", no dropout"), configure(setting, C1, batch_size, "plain", dropout=0.0))
        for batch_size in (C1.small, C1.large)
    ]
    baseline = configure(setting, C1, C1.large, "plain")
    how = {"noise": "bernoulli", "scale": "weight", "strength": 1.0, "dropout": 0.0}
    dropped = configure(setting, C1, C1.large, "smoothout", **how)
    text = label(C1, C1.large, "smoothout", ", Bernoulli noise ½, no dropout")
    return [*rows, Row(text, dropped, versus=baseline)]


def _swa(setting: Setting) -> list[Row]:
    baseline = configure(setting, C1, C1.large, "plain")
    return [Row(label(C1, C1.large, "swa"), configure(setting, C1, C1.large, "swa"), versus=baseline)]


# ---- verdicts --------------------------------------------------------------------------------------------------------


def _at(setting: Setting, batch: str, method: str) -> Config:
    return configure(setting, C1, getattr(C1, batch), method)


def _strength_is_robust(setting: Setting, records: Records) -> Verdict:
    claim = "a is robust: chosen at the small batch, it serves the large one untouched"
    setting = replace(setting, preset="ours")
    small, large = ([held_out(setting, C1, size, "plain"), *_strengths(setting, size)] for size in (C1.small, C1.large))
    groups = groups_of((*small, *large), records)
    if isinstance(groups, str):
        return Verdict(claim, groups, "")
    at_small, at_large = groups[: len(small)], groups[len(small) :]
    best = max(range(1, len(at_small)), key=lambda i: at_small[i].sample(reported).mean)
    gains = [compare(at_large[0], group, reported) for group in at_large[1:]]
    helpful = [f"{FACTORS[i]:g}" for i, gain in enumerate(gains) if gain and gain.is_shown and gain.mean > 0]
    reused = gains[best - 1]
    evidence = (
        f"chosen at {C1.small}: a = {USUAL['smoothout'] * FACTORS[best - 1]:g}; at {C1.large} it changes held-out "
        f"accuracy by {_points(reused)}; a gain is measured there at a × {', '.join(helpful) or 'none'} "
        f"(of × {', '.join(f'{factor:g}' for factor in FACTORS)})"
    )
    return Verdict(claim, sense_of(reused, less="does not hold"), evidence)


def _strengths(setting: Setting, batch_size: int) -> list[Config]:
    return [row.config for row in robustness_rows(setting, C1, batch_size, "smoothout")]


def _large_gains_more(setting: Setting, records: Records) -> Verdict:
    claim = "the large batch gains more from SmoothOut than the small one, at the same learning rate"
    sides = [_at(setting, batch, method) for batch in ("small", "large") for method in ("plain", "smoothout")]
    groups = groups_of(sides, records)
    if isinstance(groups, str):
        return Verdict(claim, groups, "")
    gains = [pairs(plain, smooth, reported) for plain, smooth in (groups[:2], groups[2:])]
    if not all(gains):
        return Verdict(claim, NOT_MEASURED, "")
    more = difference(gains[0], gains[1], paired=False)
    means = [f"{100 * Sample(tuple(gain)).mean:+.2f}" for gain in gains]
    evidence = f"gain {means[0]} points at {C1.small}, {means[1]} at {C1.large}; the difference is {_points(more)}"
    return Verdict(claim, sense_of(more, less="does not hold"), evidence)


def _large_reaches_small(setting: Setting, records: Records) -> Verdict:
    claim = "the large batch with SmoothOut reaches the small-batch baseline"
    groups = groups_of((_at(setting, "small", "plain"), _at(setting, "large", "smoothout")), records)
    if isinstance(groups, str):
        return Verdict(claim, groups, "")
    gap = compare(groups[0], groups[1], reported)
    evidence = f"batch {C1.large} with SmoothOut minus batch {C1.small} without: {_points(gap)}"
    if gap is None or gap.n < FEWEST_RUNS:
        return Verdict(claim, "too few runs", evidence)
    if not gap.is_shown:
        return Verdict(claim, "no difference measured between the two", evidence)
    return Verdict(claim, "holds: it is above" if gap.mean > 0 else "does not hold: it stays below", evidence)


def _ranks_agree(setting: Setting, records: Records) -> Verdict:
    """Over the means of configurations: runs that differ in their seed alone are no further evidence of a ranking.

    Accuracies are those of the runs that were measured.
    """
    claim = "sharpness, slope under noise and accuracy rank the minima alike"
    points, runs = [], 0
    for row in rows_of(setting, C1):
        measured = [
            (found.answer(sharpness(setting)), found.answer(sensitivity(setting)), found.run.record)
            for found in records.seeds_of(row.config)
        ]
        values = [(s.value, n.slope, reported(record)) for s, n, record in measured if s and n and record]
        points += [tuple(map(fmean, zip(*values)))] if values else []
        runs += len(values)
    if len(points) < 6:
        return Verdict(
            claim, NOT_MEASURED, f"{len(points)} configurations with both measurements; at least 6 are needed"
        )
    from scipy import stats

    sharp, slopes, accuracies = zip(*points)
    agreement = {
        name: stats.kendalltau(values, accuracies) for name, values in (("sharpness", sharp), ("slope", slopes))
    }
    evidence = f"over the means of {len(points)} configurations ({runs} runs), Kendall's τ with accuracy: " + ", ".join(
        f"{name} {tau.statistic:+.2f} (p = {tau.pvalue:.2g})" for name, tau in agreement.items()
    )
    shown = all(tau.statistic < 0 and tau.pvalue < 0.05 for tau in agreement.values())
    return Verdict(claim, "holds: both fall as accuracy rises" if shown else "no common ranking measured", evidence)


def _dropout_leaves_the_gap(setting: Setting, records: Records) -> Verdict:
    claim = "dropout does not close the gap between small and large batch"
    *without, dropped = (row.config for row in _dropout(setting))
    groups = groups_of([*(_at(setting, batch, "plain") for batch in ("small", "large")), *without], records)
    if isinstance(groups, str):
        return Verdict(claim, groups, "")
    texts, gaps = [], []
    for name, (small, large) in (("with dropout", groups[:2]), ("without", groups[2:])):
        gaps.append(compare(large, small, reported))
        texts.append(f"gap {name}: {_points(gaps[-1])}")
    of_noise = groups_of((_at(setting, "large", "plain"), dropped), records)
    if not isinstance(of_noise, str):
        base, noisy = of_noise
        texts.append(f"Bernoulli noise at {C1.large} changes accuracy by {_points(compare(base, noisy, reported))}")
    return Verdict(claim, sense_of(gaps[0], less="does not hold"), "; ".join(texts))


def _spread_over_runs(setting: Setting, records: Records) -> Verdict:
    claim = "different runs converge to similar accuracy: standard deviations of C1"
    too_few = f"at least {FEWEST_RUNS} runs of each kind are needed"
    groups = groups_of([_at(setting, batch, method) for method, batch in PAPER_SDS], records)
    if isinstance(groups, str):
        return Verdict(claim, groups, too_few if groups == NOT_MEASURED else "")
    texts, inside = [], 0
    for group, ((_, batch), paper) in zip(groups, PAPER_SDS.items()):
        sd = group.sample(reported).sd
        if sd is None or len(group.records) < FEWEST_RUNS:
            return Verdict(claim, NOT_MEASURED, too_few)
        freedom = len(group.records) - 1
        # χ² quantiles; `scipy.stats` has them too, and takes most of a second to import.
        low, high = (100 * sd * (freedom / (2 * gammaincinv(freedom / 2, q))) ** 0.5 for q in (0.975, 0.025))
        inside += low <= paper <= high
        texts.append(f"{group.method_name} {getattr(C1, batch)}: {100 * sd:.2f} [{low:.2f}, {high:.2f}], paper {paper}")
    agree = f"{inside} of {len(PAPER_SDS)} of the paper's lie in our 95 % intervals"
    return Verdict(claim, agree, "points: " + "; ".join(texts))


def _averaging_at_large_batch(setting: Setting, records: Records) -> Verdict:
    claim = "averaging weights (SWA) at the large batch"
    groups = groups_of([_at(setting, "large", method) for method in ("plain", "swa")], records)
    if isinstance(groups, str):
        return Verdict(claim, groups, "")
    gain = compare(groups[0], groups[1], reported)
    gains = gain is not None and gain.is_shown and gain.mean > 0
    verdict = "gains over the baseline" if gains else "no gain measured"
    return Verdict(claim, verdict, f"against the baseline: {_points(gain)}")


JUDGES: tuple[Judge, ...] = (
    _strength_is_robust,
    _large_gains_more,
    _large_reaches_small,
    _ranks_agree,
    _dropout_leaves_the_gap,
    _spread_over_runs,
    _averaging_at_large_batch,
)


def _points(found: Difference | None) -> str:
    return "– (n < 2)" if found is None else found.in_points()
