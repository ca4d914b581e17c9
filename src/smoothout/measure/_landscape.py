"""The loss along filter-normalised random directions (Li et al., 2018): a picture of the surroundings of a minimum."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from smoothout.checks import positive_number, whole_number
from smoothout.measure._sensitivity import mean_of_rows
from smoothout.measure.loss_at import AccuracyFunction, LossFunction, ModelLossAt, model_loss_at
from smoothout.measure.result import Progress, Result, no_progress
from smoothout.select import Predicate, not_normalisation
from smoothout.smooth import make_perturbation

Values = tuple[float, ...] | tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Landscape(Result):
    """Losses on a line or on a square grid.

    Args:
        coordinates: along each axis, in units of the filters' own norms.
        losses: 1-D: one value a coordinate, the mean over the directions. 2-D: `losses[i][j]` at `coordinates[i]` along
            the first direction and `coordinates[j]` along the second.
        accuracies: the same of accuracies, or None.
        curves: 1-D: the losses along each direction, one tuple each.
        base_loss: the loss at the centre.
    """

    coordinates: tuple[float, ...]
    losses: Values
    accuracies: Values | None
    curves: tuple[tuple[float, ...], ...] = ()
    base_loss: float = math.nan

    @property
    def dims(self) -> int:
        return 2 if isinstance(self.losses[0], tuple) else 1

    def plot(self, **options: Any) -> Any:
        """1-D: the mean with a band from the lowest to the highest direction; 2-D: contours, or `surface=True`."""
        from smoothout.measure import plots

        return plots.plot_landscape({"": self}, **options)


def landscape(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    dims: int = 1,
    span: float = 1.0,
    steps: int = 51,
    seed: int = 0,
    directions: int | None = None,
    accuracy_fn: AccuracyFunction | None = None,
    select: Predicate | None = None,
    train_mode: bool = False,
    progress: Progress | None = None,
) -> Landscape:
    """C(w + x·d), or C(w + x·d + y·e), along random Gaussian directions with ‖dᵢ‖ = ‖wᵢ‖ for every filter i.

    Filters are those of the library (`smoothout.filters`): in a 1-D tensor, such as a bias, each element is one, so
    that its direction is ±b. At x = 1 half of BatchNorm's scales would be zero, and little else would be seen.

    Args:
        model, loss_fn, batches, accuracy_fn, train_mode: see `measure.loss_at`.
        dims: 1, or 2 for a grid of steps × steps.
        span: coordinates go from −span to span.
        steps: points along an axis; the middle of an odd number is the model itself.
        seed: of the directions. Models with tensors of the same shapes get the same raw directions.
        directions: 1-D: how many, each with a curve of its own; the result has their mean and a band.
        select: by default every trainable parameter but those of normalisation layers, for the reason above. Li et al.
            leave biases out, too: `select=lambda name, parameter, module: parameter.ndim > 1`; the authors' script
            moves everything: `smoothout.select.everything`.
        progress: called with (points done, points in all).

    Returns:
        A `Landscape`.

    Examples:
        >>> measure.landscape(model, loss_fn, [batch], directions=5).plot()
    """
    dims, span, steps, directions = _checked(dims, span, steps, directions)
    axis = symmetric_grid(span, steps)
    chosen = not_normalisation if select is None else select
    with model_loss_at(model, loss_fn, batches, select=chosen, train_mode=train_mode, accuracy_fn=accuracy_fn) as at:
        base_loss = at.base_loss()
        vectors = filter_directions(at, dims if dims == 2 else directions or 1, seed)
        points = [(x,) for x in axis] if dims == 1 else list(itertools.product(axis, axis))
        bundles = [vectors] if dims == 2 else [[vector] for vector in vectors]
        losses = np.empty((len(bundles), len(points)))
        accuracies = np.full_like(losses, np.nan)
        for done, (i, j) in enumerate(np.ndindex(losses.shape), start=1):
            at.write(_point(at.start, points[j], bundles[i]))
            losses[i, j], accuracy = at.loss_and_accuracy()
            accuracies[i, j] = math.nan if accuracy is None else accuracy
            (progress or no_progress)(done, losses.size)
    shape = (steps,) * dims
    return Landscape(
        axis,
        _nested(mean_of_rows(losses).reshape(shape)),
        None if np.isnan(accuracies).all() else _nested(mean_of_rows(accuracies).reshape(shape)),
        _nested(losses) if dims == 1 else (),
        base_loss,
    )


def filter_directions(at: ModelLossAt, count: int, seed: int) -> list[Tensor]:
    """Random Gaussian directions with ‖dᵢ‖ = ‖wᵢ‖ for every filter i: AdaSmoothOut's noise of strength 1, flat."""
    chosen = {id(s.parameter) for s in at.selected}
    perturbation = make_perturbation(
        at.model, "gaussian", "filter", lambda name, parameter, module: id(parameter) in chosen, seed, shared_noise=True
    )
    # A negative step: training never draws these.
    return [at.flat(perturbation.draw(1.0, step=-1, draw=i)) for i in range(count)]


def symmetric_grid(span: float, steps: int) -> tuple[float, ...]:
    """From −span to span, the same distances on both sides, exactly 0 in the middle of an odd number."""
    return tuple((2 * i - (steps - 1)) / (steps - 1) * span for i in range(steps))


def _point(start: Tensor, coordinates: Iterable[float], directions: Iterable[Tensor]) -> Tensor:
    w = start.clone()
    for x, direction in zip(coordinates, directions):
        w.add_(direction, alpha=x)
    return w


def _nested(values: np.ndarray) -> Any:
    """Tuples of tuples of numbers."""
    return tuple(map(_nested, values)) if values.ndim > 1 else tuple(values.tolist())


def _checked(dims: int, span: float, steps: int, directions: int | None) -> tuple[int, float, int, int | None]:
    if dims not in (1, 2):
        raise ValueError(f"dims={dims!r}: use 1 for lines or 2 for a grid")
    if directions is not None and dims == 2:
        raise ValueError(f"directions={directions!r} with dims=2: they are for dims=1, a curve each")
    return (
        whole_number("dims", dims),
        positive_number("span", span, "1.0"),
        whole_number("steps", steps, 2, ", odd to have the model itself in the middle"),
        None if directions is None else whole_number("directions", directions),
    )
