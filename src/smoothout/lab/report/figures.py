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


def label_of(group: Group) -> str:
    return f"{group.method_name}, batch {group.config.batch_size}"


def line_style(group: Group, groups: Sequence[Group]) -> dict[str, Any]:
    """A colour a method; the larger batch is drawn solid, the smaller one dashed."""
    largest = max(g.config.batch_size for g in groups)
    return {
        "color": COLOURS[group.config.method],
        "linestyle": "-" if group.config.batch_size == largest else "--",
    }


def training_curves(groups: Sequence[Group], value: Callable[[EpochMetrics], float], name: str, log: bool) -> str:
    """Mean over seeds of a figure of every epoch, against the part of training that is done."""

    def draw(axes: Any) -> None:
        for group in groups:
            epochs = range(min(len(run.metrics) for run in group.runs))
            means = [sum(value(run.metrics[e]) for run in group.runs) / len(group.runs) for e in epochs]
            done = [(e + 1) / len(epochs) for e in epochs]
            axes.plot(done, means, label=label_of(group), **line_style(group, groups))
        axes.set(xlabel="part of training done", ylabel=name)
        if log:
            axes.set_yscale("log")
        axes.legend(fontsize=9)

    return to_svg(draw)


def sensitivity_curves(groups: Sequence[Group], curves: Sequence[Sequence[Any]], name: str) -> str:
    """C̄(w; a) against a: the mean over runs, with a band of one standard deviation over them."""

    def draw(axes: Any) -> None:
        for group, members in zip(groups, curves, strict=True):
            strengths = members[0].strengths
            samples = [Sample(losses) for losses in zip(*(curve.losses for curve in members), strict=True)]
            low, high = ([s.mean + sign * (s.sd or 0.0) for s in samples] for sign in (-1, 1))
            style = line_style(group, groups)
            axes.plot(strengths, [s.mean for s in samples], label=label_of(group), **style)
            axes.fill_between(strengths, low, high, color=style["color"], alpha=0.13, linewidth=0)
        axes.set(xlabel=name, ylabel="training loss under noise, C̄(w; a)", ylim=(0, None))
        axes.legend(fontsize=9)

    return to_svg(draw)
