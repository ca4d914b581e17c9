"""Plots of training, as SVG text for a page."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from smoothout.lab.report.groups import Group, Sample
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
    """A colour a method, in shades where it has several configurations of a batch size.

    The largest batch is drawn solid, smaller ones dashed.
    """
    largest = max(g.config.batch_size for g in groups)
    styles = []
    for group in groups:
        alike = [g for g in groups if (g.config.method, g.config.batch_size) == _kind(group)]
        colour = _lighter(COLOURS[group.config.method], 0.65 * alike.index(group) / max(1, len(alike) - 1))
        styles.append({"color": colour, "linestyle": "-" if group.config.batch_size == largest else "--"})
    return styles


def _kind(group: Group) -> tuple[str, int]:
    return group.config.method, group.config.batch_size


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
    """Mean over seeds of a figure of every epoch, against the part of training that is done."""

    def draw(axes: Any) -> None:
        for group, label, style in zip(groups, names, line_styles(groups), strict=True):
            epochs = range(min(len(run.metrics) for run in group.runs))
            means = [sum(value(run.metrics[e]) for run in group.runs) / len(group.runs) for e in epochs]
            done = [(e + 1) / len(epochs) for e in epochs]
            axes.plot(done, means, label=label, **style)
        axes.set(xlabel="part of training done", ylabel=name)
        if log:
            axes.set_yscale("log")

    return _with_legend(draw, names)


def sensitivity_curves(
    groups: Sequence[Group], names: Sequence[str], curves: Sequence[Sequence[Any]], name: str
) -> str:
    """C̄(w; a) against a: the mean over runs, with a band of one standard deviation over them."""

    def draw(axes: Any) -> None:
        for label, members, style in zip(names, curves, line_styles(groups), strict=True):
            strengths = members[0].strengths
            samples = [Sample(losses) for losses in zip(*(curve.losses for curve in members), strict=True)]
            low, high = ([s.mean + sign * (s.sd or 0.0) for s in samples] for sign in (-1, 1))
            axes.plot(strengths, [s.mean for s in samples], label=label, **style)
            axes.fill_between(strengths, low, high, color=style["color"], alpha=0.13, linewidth=0)
        axes.set(xlabel=name, ylabel="training loss under noise, C̄(w; a)", ylim=(0, None))

    return _with_legend(draw, names)
