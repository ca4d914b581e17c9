"""The paper's figures from measurements of run folders or packs: each a function that draws on given axes."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from statistics import fmean
from typing import Any

import numpy as np

from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import Curve, Drawing
from smoothout.lab.groups import Group
from smoothout.lab.report import figures
from smoothout.lab.runs import EpochMetrics
from smoothout.measure import Sensitivity, plots

COPIES, SHOWN, TOY_STRENGTH = 1024, 40, 0.45
SIZE = (6.4, 4.4)

Draw = Callable[[Any], None]


def drawn(drawing: Drawing, records: Records) -> Draw | None:
    """What draws it on axes; None where nothing has been measured for it."""
    if drawing.kind == "toy":
        return draw_toy
    if drawing.kind == "low-pass":
        return draw_low_pass
    if drawing.kind in BY_EPOCH:
        return _drawn_by_epoch(drawing, records)
    if drawing.kind == "accuracy by learning rate":
        return _drawn_by_rate(drawing, records)
    measured = _measured(drawing, records)
    if not measured:
        return None
    results = dict(_shown(curve.label, by_seed) for curve, by_seed in measured)
    how: dict[str, Any] = {
        "log": _spans_decades(results),
        "colours": _colours(drawing, [curve for curve, _ in measured]),
    }
    kinds: dict[str, Callable[[Mapping[str, Any], Any], object]] = {
        "interpolation": lambda results, axes: plots.plot_interpolation(results, axes, ends=drawing.ends),
        "loss under noise": lambda results, axes: plots.plot_sensitivity(results, axes, **how),
        "accuracy under noise": _draw_accuracy,
        "landscape": lambda results, axes: plots.plot_landscape(results, axes, **how),
    }

    def draw(axes: Any) -> None:
        kinds[drawing.kind](results, axes)

    return draw


def _measured(drawing: Drawing, records: Records) -> list[tuple[Curve, dict[int, Any]]]:
    """The curves of a drawing that are measured, with their results by seed."""
    found = []
    for curve in drawing.curves:
        runs, wanted = records.seeds_of(curve.config), curve.of
        answers = {run.run.config.seed: None if wanted is None else run.answer(wanted) for run in runs}
        by_seed = {seed: result for seed, result in answers.items() if result is not None}
        if by_seed:
            found.append((curve, by_seed))
    return found


def _shown(label: str, by_seed: Mapping[int, Any]) -> tuple[str, Any]:
    """Losses under noise as the mean over runs; of lines and landscapes, whose shapes have no mean, one run's."""
    seed, first = next(iter(by_seed.items()))
    if not isinstance(first, Sensitivity) or len(by_seed) == 1:
        return f"{label} (seed {seed})", first
    return f"{label} (n = {len(by_seed)})", _mean(list(by_seed.values()))


def _mean(runs: Sequence[Sensitivity]) -> Sensitivity:
    """The mean of several runs, with the deviation over runs in place of that over draws."""
    losses = np.array([run.losses for run in runs])
    accuracies = [run.accuracies for run in runs if run.accuracies is not None]
    return replace(
        runs[0],
        losses=tuple(losses.mean(0)),
        spreads=tuple(losses.std(0, ddof=1)),
        accuracies=tuple(np.mean(accuracies, axis=0)) if accuracies else None,
        slope=fmean(run.slope for run in runs),
        draws=sum(run.draws for run in runs),
    )


def _colours(drawing: Drawing, shown: Sequence[Curve]) -> Sequence[str]:
    """One a method, the same in every picture, where methods are compared."""
    compares_methods = len({curve.config.method for curve in drawing.curves}) > 1
    return figures.colours([curve.config for curve in shown]) if compares_methods else plots.COLOURS


def to_png(draw: Draw) -> bytes:
    """The picture as a file of pixels."""
    import matplotlib

    with matplotlib.rc_context(figures.STYLE):
        axes = plots.new_axes(SIZE)
        draw(axes)
        stream = io.BytesIO()
        axes.figure.savefig(stream, format="png")
    return stream.getvalue()


def to_svg(draw: Draw) -> str:
    """The picture as text for a page."""
    return figures.to_svg(draw, SIZE)


# ---- Figure 1 --------------------------------------------------------------------------------------------------------


def toy_loss(w: np.ndarray) -> np.ndarray:
    """A sharp minimum at −1.5, a little deeper than the flat one at 1.2."""
    sharp = 0.95 * np.exp(-(((w + 1.5) / 0.13) ** 2) / 2)
    flat = 0.85 * np.exp(-(((w - 1.2) / 0.75) ** 2) / 2)
    return 1.0 + 0.02 * w**2 - sharp - flat


def draw_toy(axes: Any) -> None:
    """The landscape, shifted copies of it, and their mean."""
    w = np.linspace(-3.2, 3.2, 801)
    shifts = np.random.default_rng(0).uniform(-TOY_STRENGTH, TOY_STRENGTH, COPIES)
    copies = toy_loss(w + shifts[:, None])
    for copy in copies[:SHOWN]:
        axes.plot(w, copy, color="0.75", lw=0.6, alpha=0.7)
    axes.plot(w, toy_loss(w), color="black", lw=1.8, label="C(w)")
    axes.plot([], [], color="0.75", label=f"{SHOWN} of {COPIES:,} shifted copies, a = {TOY_STRENGTH}")
    mean = copies.mean(0)
    axes.plot(w, mean, color=plots.COLOURS[0], lw=2.4, label=f"the mean of all {COPIES:,}")
    lowest = mean.argmin()
    axes.plot(w[lowest], mean[lowest], "o", color=plots.COLOURS[1], label="its lowest point")
    axes.set(xlabel="w", ylabel="loss", ylim=(0, 1.75))
    axes.legend(fontsize=9, frameon=False, ncols=2, loc="upper center")


def draw_low_pass(axes: Any) -> None:
    """What is left of a wave of the landscape after averaging, against how fast it is."""
    ka = np.linspace(0, 4 * np.pi, 400)
    axes.plot(ka, np.sinc(ka / np.pi), color=plots.COLOURS[0], label="uniform, sin(ka)/(ka)")
    axes.plot(ka, np.exp(-(ka**2) / 2), color=plots.COLOURS[1], ls="--", label="Gaussian, exp(−a²k²/2)")
    axes.axhline(0, color="0.6", lw=0.8)
    axes.set(xlabel="frequency × strength, ka", ylabel="factor on cos(kw)")
    axes.legend(frameon=False)


# ---- epoch by epoch --------------------------------------------------------------------------------------------------


def _accuracy_by_epoch(epoch: EpochMetrics) -> float:
    return 100 * epoch.test_accuracy


BY_EPOCH: dict[str, tuple[Callable[[EpochMetrics], float], str]] = {
    "accuracy by epoch": (_accuracy_by_epoch, "accuracy at clean weights, %"),
    "training loss by epoch": (lambda epoch: epoch.train_loss, "training loss, under a method's noise"),
}


def _drawn_by_epoch(drawing: Drawing, records: Records) -> Draw | None:
    """Means over seeds; None where fewer than two of several curves are there.

    Accuracies of the first quarter of training may lie below the picture.
    """
    value, name = BY_EPOCH[drawing.kind]
    found = [(curve.label, records.group(curve.config)) for curve in drawing.curves]
    known = {f"{label} (n = {len(group.runs)})": group for label, group in found if group is not None}
    if len(known) < min(2, len(found)):
        return None

    def draw(axes: Any) -> None:
        lowest, highest = [], []
        for (label, group), style in zip(known.items(), figures.line_styles(list(known.values())), strict=True):
            means = np.mean([[value(epoch) for epoch in run.metrics] for run in group.runs], axis=0)
            axes.plot(range(1, len(means) + 1), means, label=label, lw=1.3, **style)
            lowest.append(np.quantile(means, 0.25))
            highest.append(means.max())
        axes.set(xlabel="epoch", ylabel=name)
        if value is _accuracy_by_epoch:
            axes.set_ylim(min(lowest) - 2, max(highest) + 1)
        else:
            axes.set_yscale("log")
        axes.legend(frameon=False, fontsize=9)

    return draw


# ---- by learning rate ------------------------------------------------------------------------------------------------


def _drawn_by_rate(drawing: Drawing, records: Records) -> Draw | None:
    """A line for the curves of one label, mean and deviation over seeds at each rate; None where nothing has two."""
    known: dict[str, list[Group]] = {}
    for curve in drawing.curves:
        if (group := records.group(curve.config)) is not None:
            known.setdefault(curve.label, []).append(group)
    known = {name: sorted(groups, key=lambda g: g.config.lr) for name, groups in known.items() if len(groups) > 1}
    if not known:
        return None

    def draw(axes: Any) -> None:
        styles = figures.line_styles([groups[0] for groups in known.values()])
        for (name, groups), style in zip(known.items(), styles, strict=True):
            samples = [group.sample(lambda record: 100 * record.last.test_accuracy) for group in groups]
            n = " to ".join(str(count) for count in sorted({min(s.n for s in samples), max(s.n for s in samples)}))
            axes.errorbar(
                [group.config.lr for group in groups],
                [sample.mean for sample in samples],
                [sample.sd or 0.0 for sample in samples],
                label=f"{name} (n = {n})",
                marker="o",
                markersize=4,
                capsize=3,
                **style,
            )
        ticks = sorted({group.config.lr for groups in known.values() for group in groups})
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel="learning rate", ylabel="accuracy at clean weights, %")
        axes.legend(frameon=False, fontsize=9)

    return draw


# ---- under noise -----------------------------------------------------------------------------------------------------


def _draw_accuracy(results: Mapping[str, Any], axes: Any) -> None:
    for colour, (name, result) in zip(cycle(plots.COLOURS), results.items()):
        if result.accuracies is not None:
            accuracies = np.multiply(100, result.accuracies)
            axes.plot(result.strengths, accuracies, color=colour, marker="o", markersize=3.5, label=name)
    axes.set(xlabel=plots.SCALES["absolute"], ylabel="accuracy under noise, %", ylim=(0, 102))
    axes.legend(frameon=False)


def _spans_decades(results: Mapping[str, Any]) -> bool:
    losses = np.concatenate([np.ravel(result.losses) for result in results.values()])
    return bool(0 < 100 * losses.min() < losses.max())
