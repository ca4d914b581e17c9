"""Plots of results. Each function overlays several, given as {name: result}; matplotlib is imported when called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from smoothout.extras import install

if TYPE_CHECKING:
    from smoothout.measure._curvature import Curvature
    from smoothout.measure._interpolate import Interpolation
    from smoothout.measure._landscape import Landscape
    from smoothout.measure._sensitivity import Sensitivity
    from smoothout.measure._sharpness import Sharpness
    from smoothout.measure.strength import SuggestedStrength

# Okabe and Ito's palette, which colour-blind readers can tell apart, without its yellow, which is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
LINES = ("-", "--", "-.", ":")  # so that curves stay apart in print, too
LINE_OF_LEGEND, BESIDE_A_NAME = 80, 8  # characters above a plot, and what a curve's sample and gaps take of them
SCALES = {
    "absolute": "strength a",
    "filter": "strength a, relative to filter norms",
    "weight": "strength a, relative to weights",
}


def new_axes(size: tuple[float, float] = (6.0, 4.0), **subplot: Any) -> Any:
    """Axes on a figure of their own; it is not shown, and no window is opened."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plots need matplotlib: {install('lab')}") from error
    return Figure(figsize=size, dpi=150, layout="constrained").add_subplot(**subplot)


def plot_sharpness(results: Mapping[str, Sharpness], ax: Any = None) -> Any:
    """A point for each start, a bar for the maximum; a result that failed says so."""
    ax = _prepared(ax, "", "sharpness, %", size=(1.2 + sum(max(1.2, 0.11 * len(name)) for name in results), 4.0))
    for x, (colour, result) in enumerate(zip(cycle(COLOURS), results.values())):
        finite = result.value == result.value
        ax.bar(x, result.value if finite else 0.0, width=0.6, color=colour, alpha=0.35)
        ax.plot([x] * len(result.trials), result.trials, "o", color=colour, markersize=5, alpha=0.8)
        number = [f"{result.value:.3g}"] if finite else []
        ax.annotate(
            "\n".join(["failed"] * (result.status == "failed") + number),
            (x, result.value if finite else 0.0),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
        )
    ax.set_xticks(range(len(results)), [name or "max and starts" for name in results])
    ax.set_xlim(-0.8, len(results) - 0.2)
    ax.margins(y=0.12)
    ax.grid(axis="x", visible=False)
    return ax


def plot_sensitivity(
    results: Mapping[str, Sensitivity], ax: Any = None, *, log: bool = False, colours: Sequence[str] = COLOURS
) -> Any:
    """C̄ over a, with a band of one spread on each side.

    Args:
        log: a logarithmic loss axis, for curves that end far above where they start.
        colours: of the curves, in their order.
    """
    scales = {result.scale for result in results.values()}
    label = SCALES.get(scales.pop(), "strength a") if len(scales) == 1 else "strength a"
    ax = _prepared(ax, label, "mean loss under noise")
    for style, (name, result) in zip(_styles(colours), results.items()):
        strengths, losses, spreads = _from_left_to_right(result.strengths, result.losses, result.spreads)
        ax.plot(strengths, losses, **style, marker="o", markersize=3.5, label=name or None)
        if result.draws > 1:
            ax.fill_between(strengths, losses - spreads, losses + spreads, color=style["color"], alpha=0.18, lw=0)
    if log:
        ax.set_yscale("log")
    return _with_legend(ax, results, above=len(results) > 4)


def plot_interpolation(
    results: Mapping[str, Interpolation],
    ax: Any = None,
    *,
    log: bool | None = None,
    ends: tuple[str, str] = ("first checkpoint", "second"),
) -> Any:
    """Loss along α; where there are accuracies, they are dotted, on a second axis.

    Args:
        log: a logarithmic loss axis; by default where losses span more than three orders of magnitude, as they do when
            interpolated BatchNorm statistics fit neither end. The axis ends a hundred times above the highest loss
            between the ends: beyond them such losses have no bound.
        ends: what lies at α = 0 and at α = 1.
    """
    ax = _prepared(ax, f"α   (0: {ends[0]}, 1: {ends[1]})", "loss")
    for α in (0.0, 1.0):
        ax.axvline(α, color="0.6", lw=0.8, zorder=0)
    second = None
    for colour, (name, result) in zip(cycle(COLOURS), results.items()):
        alphas, losses = _from_left_to_right(result.alphas, result.losses)
        ax.plot(alphas, losses, color=colour, marker="o", markersize=3, label=name or None)
        if result.accuracies is not None:
            second = ax.twinx() if second is None else second
            _, accuracies = _from_left_to_right(result.alphas, result.accuracies)
            second.plot(alphas, 100 * accuracies, color=colour, ls=":", lw=1.6)
    if second is not None:
        second.set_ylabel("accuracy, % (dotted)")
        second.set_ylim(0, 102)
        second.grid(False)  # it would lie over the curves of the first
        second.spines["top"].set_visible(False)
    losses = np.concatenate([result.losses for result in results.values()])
    alphas = np.concatenate([result.alphas for result in results.values()])
    alphas, losses = alphas[np.isfinite(losses)], losses[np.isfinite(losses)]
    if log or (log is None and losses.size and 0 < 1e3 * losses.min() < losses.max()):
        ax.set_yscale("log")
    top = 100 * losses[(alphas >= 0) & (alphas <= 1)].max(initial=0)
    if 0 < top < losses.max(initial=0):
        ax.set_ylim(top=top, **({} if ax.get_yscale() == "log" else {"bottom": min(0, 1.05 * losses.min())}))
    return _with_legend(ax, results, above=True)


def plot_landscape(
    results: Mapping[str, Landscape],
    ax: Any = None,
    *,
    surface: bool = False,
    log: bool = False,
    colours: Sequence[str] = COLOURS,
) -> Any:
    """1-D: curves with a band over the directions, several results in one plot. 2-D: one result's contours.

    Args:
        surface: 2-D as a surface in three dimensions.
        log: contours, or the loss axis, by the loss's logarithm.
        colours: of the curves, in their order.
    """
    dims = {result.dims for result in results.values()}
    if dims == {1}:
        return _landscape_lines(results, ax, log, colours)
    if len(results) != 1:
        raise ValueError("2-D landscapes do not overlay: plot them one by one, each on its own axes")
    ((name, result),) = results.items()
    ax = (_landscape_surface if surface else _landscape_contours)(result, ax, log)
    if name:
        ax.set_title(name)
    return ax


def _landscape_lines(results: Mapping[str, Landscape], ax: Any, log: bool, colours: Sequence[str]) -> Any:
    ax = _prepared(ax, "distance along a filter-normalised direction", "loss")
    for style, (name, result) in zip(_styles(colours), results.items()):
        ax.plot(result.coordinates, result.losses, **style, label=name or None)
        if len(result.curves) > 1:
            low, high = np.min(result.curves, axis=0), np.max(result.curves, axis=0)
            ax.fill_between(result.coordinates, low, high, color=style["color"], alpha=0.18, lw=0)
    if log:
        ax.set_yscale("log")
    return _with_legend(ax, results, above=True)


def _landscape_contours(result: Landscape, ax: Any, log: bool) -> Any:
    ax = _prepared(ax, "first direction", "second direction", size=(5.2, 4.2))
    x, z = result.coordinates, _heights(result, log)
    filled = ax.contourf(x, x, z.T, levels=24, cmap="cividis")
    ax.contour(x, x, z.T, levels=12, colors="white", linewidths=0.5, alpha=0.7)
    ax.plot(0, 0, "+", color="white", markersize=11, markeredgewidth=2)
    ax.figure.colorbar(filled, ax=ax, label="log₁₀ loss" if log else "loss")
    ax.set_aspect("equal")
    ax.locator_params(nbins=5)
    ax.grid(visible=False)
    return ax


def _landscape_surface(result: Landscape, ax: Any, log: bool) -> Any:
    ax = new_axes((5.6, 4.6), projection="3d") if ax is None else ax
    x, y = np.meshgrid(result.coordinates, result.coordinates, indexing="ij")
    ax.plot_surface(x, y, _heights(result, log), cmap="cividis", linewidth=0, antialiased=True)
    ax.locator_params(axis="x", nbins=4)
    ax.locator_params(axis="y", nbins=4)
    ax.set_xlabel("first direction", labelpad=8)
    ax.set_ylabel("second direction", labelpad=8)
    ax.set_zlabel("log₁₀ loss" if log else "loss")
    ax.set_box_aspect(None, zoom=0.85)  # else the z label is cut off
    return ax


def _heights(result: Landscape, log: bool) -> np.ndarray:
    losses = np.asarray(result.losses)
    return np.log10(losses) if log else losses


def plot_curvature(results: Mapping[str, Curvature], ax: Any = None) -> Any:
    """The leading eigenvalues by rank; traces, with their error bars, in the legend."""
    ax = _prepared(ax, "rank", "eigenvalue of the Hessian")
    for style, (name, result) in zip(_styles(COLOURS), results.items()):
        ranks = range(1, len(result.eigenvalues) + 1)
        trace = f"trace {result.trace:.4g} ± {result.trace_error:.2g}"
        label = ", ".join([*([name] if name else []), trace, *([] if result.converged else ["not converged"])])
        ax.errorbar(
            ranks, result.eigenvalues, yerr=result.residuals or None, **style, marker="o", capsize=3, label=label
        )
    most = max(len(result.eigenvalues) for result in results.values())
    ax.set_xticks(range(1, most + 1, max(1, most // 10)))
    ax.legend(frameon=False)
    return ax


def plot_suggested_strength(result: SuggestedStrength, ax: Any = None) -> Any:
    """The rise of the loss over a, both logarithmic; the limit; the strength where they meet."""
    curve = result.curve
    rises = np.subtract(curve.losses, result.base_loss)
    shown = (rises > 0) & (rises < 1e3 * result.allowed_rise) & np.isfinite(rises)
    ax = _prepared(ax, SCALES.get(curve.scale, "strength a"), "rise of the mean loss")
    ax.loglog(np.asarray(curve.strengths)[shown], rises[shown], color=COLOURS[0], marker="o", markersize=3.5)
    ax.axhline(result.allowed_rise, color="0.4", ls="--", lw=1, label=f"allowed: {result.allowed_rise:.3g}")
    ax.axvline(result.strength, color=COLOURS[1], label=f"a = {result.strength:.3g}")
    ax.legend(frameon=False)
    return ax


def _from_left_to_right(x: Sequence[float], *others: Sequence[float]) -> tuple[np.ndarray, ...]:
    """A line through points in the order in which they were asked for would go back and forth."""
    order = np.argsort(x, kind="stable")
    return tuple(np.asarray(values)[order] for values in (x, *others))


def _prepared(ax: Any, x_label: str, y_label: str, size: tuple[float, float] = (6.0, 4.0)) -> Any:
    ax = new_axes(size) if ax is None else ax
    ax.set_xlabel(x_label)
    ax.set_ylabel(y_label)
    ax.grid(color="0.9", lw=0.7)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _styles(colours: Sequence[str]) -> Any:
    """Colours and line styles together, without end."""
    for colour, line in zip(cycle(colours), cycle(LINES)):
        yield {"color": colour, "linestyle": line, "linewidth": 1.6}


def _with_legend(ax: Any, results: Mapping[str, Any], above: bool = False) -> Any:
    """A legend if there are names; above the plot where curves leave no room inside."""
    if any(results):
        columns = min(3, len(results), max(1, LINE_OF_LEGEND // (max(map(len, results)) + BESIDE_A_NAME)))
        where = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": columns} if above else {}
        ax.legend(frameon=False, **where)
    return ax
