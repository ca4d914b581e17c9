"""Plots of training, as SVG text for a page."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from smoothout.lab.config import Config
from smoothout.lab.groups import Group, Sample
from smoothout.lab.runs import EpochMetrics

# Okabe and Ito's colours, which colour-blind readers can tell apart; one a method everywhere.
COLOURS = {
    "plain": "#5b6577",
    "smoothout": "#0072b2",
    "adasmoothout": "#d55e00",
    "sam": "#009e73",
    "swa": "#cc79a7",
    "lpfsgd": "#56b4e9",
    "asam": "#e69f00",
    "ema": "#f0e442",
    "ensemble": "#000000",
}
STYLE = {
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e9ef",
    "axes.edgecolor": "#aab2bf",
    "axes.axisbelow": True,
    "legend.frameon": False,
}
# One a batch size, from the largest down; of a single epoch there is no line, but a marker.
DASHES = ("-", "--", ":", "-.", (0, (8, 2, 1, 2, 1, 2)), (0, (3, 6)))
MARKERS = ("o", "s", "^", "D", "v", "P")
# How many times the lowest curve under noise the highest may be before the lowest lies on the axis.
LINEAR_SHOWS = 20


def to_svg(draw: Callable[[Any], None], size: tuple[float, float] = (5.6, 3.7)) -> str:
    """Draw on one pair of axes and return the picture as text."""
    import matplotlib  # here, so that commands which draw nothing start sooner
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "the same, so that equal pages are equal files"}):
        canvas = Canvas(figsize=size, layout="constrained")
        draw(canvas.add_subplot())
        stream = io.StringIO()
        canvas.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def line_styles(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Colours as `colours` says; the largest batch is drawn solid, each smaller one in dashes of its own."""
    return [
        {"color": colour, "linestyle": DASHES[_rank(group, groups) % len(DASHES)]}
        for group, colour in zip(groups, colours([group.config for group in groups]), strict=True)
    ]


def colours(configs: Sequence[Config]) -> list[str]:
    """One a method, in shades where it has several configurations of a batch size."""
    keys = [(config.method, config.batch_size) for config in configs]
    parts = [keys[:i].count(key) / max(1, keys.count(key) - 1) for i, key in enumerate(keys)]
    return [_lighter(COLOURS[method], 0.65 * part) for (method, _), part in zip(keys, parts, strict=True)]


def _rank(group: Group, groups: Sequence[Group]) -> int:
    """The rank of its batch size, 0 for the largest."""
    return len({g.config.batch_size for g in groups if g.config.batch_size > group.config.batch_size})


def _lighter(colour: str, part: float) -> str:
    """So much of the way to white."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + part * (255 - c)):02x}" for c in channels)


def _with_legend(draw: Callable[[Any], None], names: Sequence[str]) -> str:
    """The picture, the names of its lines below it."""

    def draw_both(axes: Any) -> None:
        draw(axes)
        axes.figure.legend(loc="outside lower center", ncols=columns, fontsize=9)

    columns = 2 if max(map(len, names)) < 35 else 1
    rows = -(-len(names) // columns)
    return to_svg(draw_both, (5.6, 3.4 + 0.2 * rows))


def training_curves(
    groups: Sequence[Group], names: Sequence[str], value: Callable[[EpochMetrics], float], name: str, log: bool
) -> str:
    """Mean over seeds of a figure of every epoch, against the part of training that is done.

    Without `log` the first quarter of a curve may lie outside the picture, and nothing of what comes after it.
    """

    def draw(axes: Any) -> None:
        lowest, highest = [], []
        for group, label, style in zip(groups, names, line_styles(groups), strict=True):
            epochs = range(min(len(run.metrics) for run in group.runs))
            means = [sum(value(run.metrics[e]) for run in group.runs) / len(group.runs) for e in epochs]
            done = [(e + 1) / len(epochs) for e in epochs]
            marker = "" if len(epochs) > 1 else MARKERS[_rank(group, groups) % len(MARKERS)]
            axes.plot(done, means, label=label, marker=marker, **style)
            lowest.append(min(means[len(means) // 4 :]))
            highest.append(max(means))
        axes.set(xlabel="part of training done", ylabel=name, xlim=(0, 1.03))
        if log:
            axes.set_yscale("log")
        elif max(highest) > min(lowest):  # from 10 to 100 % nobody sees a difference of one
            room = 0.1 * (max(highest) - min(lowest))
            axes.set_ylim(min(lowest) - room, max(highest) + room)

    return _with_legend(draw, names)


def needs_decades(curves: Sequence[Sequence[Any]]) -> bool:
    """Whether the loss of some group rises so much more under noise that on one scale another's curve is not seen."""
    ends = [_mean_rises(members)[-1][1].mean for members in curves]
    return min(ends) > 0.0 and max(ends) > LINEAR_SHOWS * min(ends)


def sensitivity_curves(
    groups: Sequence[Group], names: Sequence[str], curves: Sequence[Sequence[Any]], name: str
) -> str:
    """C̄(w; a) against a: the mean over runs, with a band of one standard deviation over them.

    Where curves lie decades apart it is C̄(w; a) − C(w) in decades: the losses themselves begin at different heights,
    and in decades the lowest would seem to rise most.
    """
    in_decades = needs_decades(curves)

    def draw(axes: Any) -> None:
        lowest = []
        for label, members, style in zip(names, curves, line_styles(groups), strict=True):
            points = _mean_rises(members) if in_decades else _mean_losses(members)
            strengths, samples = zip(*points, strict=True)
            low, high = ([s.mean + sign * (s.sd or 0.0) for s in samples] for sign in (-1, 1))
            axes.plot(strengths, [s.mean for s in samples], label=label, **style)
            axes.fill_between(strengths, low, high, color=style["color"], alpha=0.13, linewidth=0)
            lowest += [s.mean for s in samples if s.mean > 0.0]
        if in_decades:
            axes.set_yscale("log")
            axes.set(xlabel=name, ylabel="rise of the loss, C̄(w; a) − C(w)", ylim=(0.7 * min(lowest), None))
        else:
            axes.set(xlabel=name, ylabel="training loss under noise, C̄(w; a)", ylim=(0, None))

    return _with_legend(draw, names)


def _mean_losses(curves: Sequence[Any]) -> list[tuple[float, Sample]]:
    """By strength, in rising order."""
    samples = (Sample(losses) for losses in zip(*(curve.losses for curve in curves), strict=True))
    return sorted(zip(curves[0].strengths, samples, strict=True), key=lambda point: point[0])


def _mean_rises(curves: Sequence[Any]) -> list[tuple[float, Sample]]:
    """The same minus the loss without noise, at every strength but 0."""
    points = _mean_losses(curves)
    (clean,) = (sample for strength, sample in points if strength == 0.0)
    return [
        (strength, Sample(tuple(v - v0 for v, v0 in zip(sample.values, clean.values, strict=True))))
        for strength, sample in points
        if strength != 0.0
    ]
