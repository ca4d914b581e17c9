"""Sensitivity: how the mean loss C̄(w; a) = E[C(w + θ)] grows with the strength a of the noise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from smoothout.checks import check_strength, list_of_numbers, whole_number
from smoothout.filters import Scale
from smoothout.measure.loss_at import AccuracyFunction, LossFunction, ModelLossAt, model_loss_at
from smoothout.measure.result import Progress, Result, no_progress
from smoothout.noise import Noise
from smoothout.perturb import Perturbation
from smoothout.select import Predicate, everything
from smoothout.smooth import make_perturbation


@dataclass(frozen=True)
class Sensitivity(Result):
    """The curve C̄(w; a) over a grid of strengths.

    Args:
        strengths: the grid, as given.
        losses: the mean over the draws at each strength.
        spreads: the standard deviation over the draws; NaN with a single draw.
        accuracies: the mean over the draws; None without an `accuracy_fn`.
        slope: s = ΔC̄/Δa, by least squares over the grid; NaN with a single strength.
        draws: how many draws each mean is over.
        noise, scale: what the noise was.
    """

    strengths: tuple[float, ...]
    losses: tuple[float, ...]
    spreads: tuple[float, ...]
    accuracies: tuple[float, ...] | None
    slope: float
    draws: int = 1
    noise: str = "uniform"
    scale: str = "absolute"

    @property
    def standard_errors(self) -> tuple[float, ...]:
        """Standard errors of the means: the spreads over √draws."""
        return tuple(spread / math.sqrt(self.draws) for spread in self.spreads)

    def plot(self, **options: Any) -> Any:
        """The curve with a band of one spread, on matplotlib axes."""
        from smoothout.measure import plots

        return plots.plot_sensitivity({"": self}, **options)


def sensitivity(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    strengths: Sequence[float],
    *,
    noise: str | Noise = "uniform",
    scale: str | Scale = "absolute",
    draws: int = 1,
    accuracy_fn: AccuracyFunction | None = None,
    seed: int = 0,
    fresh_noise_per_batch: bool = False,
    select: Predicate | None = None,
    train_mode: bool = False,
    progress: Progress | None = None,
) -> Sensitivity:
    """C̄(w; a) = E[C(w + θ)] for every strength a, by the mean over a number of draws.

    The same raw draws are used for every strength, and for every model with tensors of the same shapes: two curves
    compare with few draws, for what the draws have in common cancels.

    Args:
        model, loss_fn, batches, train_mode, accuracy_fn: see `measure.loss_at`.
        strengths: the values of a.
        noise, scale: as those of `SmoothOut`; `scale="filter"` is the measure that does not change when a filter that
            BatchNorm follows is rescaled.
        draws: how many θ the mean is over.
        seed: of the noise. The generator is private, and its numbers are none that training with this seed draws.
        fresh_noise_per_batch: a new θ for every batch, the paper's protocol (there with batches of 100): the mean over
            B batches is then over B draws. By default one θ holds for all batches.
        select: by default every trainable parameter, BatchNorm's too, as in the authors' script (their training, and
            `SmoothOut`, leaves those alone: `smoothout.select.not_normalisation`).
        progress: called with (evaluations done, evaluations in all).

    Returns:
        A `Sensitivity`.

    Examples:
        >>> curve = measure.sensitivity(model, loss_fn, [batch], [0.0, 0.01, 0.02, 0.04], draws=10)
        >>> curve.slope, curve.standard_errors
    """
    strengths, draws = _checked(strengths), whole_number("draws", draws)
    everywhere = everything if select is None else select
    with model_loss_at(
        model, loss_fn, batches, select=everywhere, train_mode=train_mode, accuracy_fn=accuracy_fn
    ) as at:
        at.base_loss()
        perturbation = make_perturbation(model, noise, scale, everywhere, seed, shared_noise=True)
        losses = np.empty((draws, len(strengths)))
        accuracies = np.full_like(losses, np.nan)
        for draw in range(draws):
            for i, points in enumerate(_points(at, perturbation, strengths, draw, fresh_noise_per_batch)):
                losses[draw, i], accuracy = at.loss_and_accuracy(points)
                accuracies[draw, i] = math.nan if accuracy is None else accuracy
                (progress or no_progress)(draw * len(strengths) + i + 1, losses.size)
    means = mean_of_rows(losses)
    with np.errstate(invalid="ignore"):  # infinite losses have no spread
        spreads = (losses - losses[0]).std(axis=0, ddof=1) if draws > 1 else np.full(len(strengths), math.nan)
    return Sensitivity(
        strengths,
        tuple(means.tolist()),
        tuple(spreads.tolist()),
        None if np.isnan(accuracies).all() else tuple(mean_of_rows(accuracies).tolist()),
        slope(strengths, means),
        draws,
        _name(noise),
        _name(scale),
    )


def _points(
    at: ModelLossAt, perturbation: Perturbation, strengths: tuple[float, ...], draw: int, fresh: bool
) -> Iterable[Any]:
    """For every strength a function from a batch's number to w + a·θ; θ is linear in a, so one draw serves all."""

    def unit_noise(batch: int) -> Tensor:
        at.write(at.start)  # filter norms are those of the clean weights
        # Negative steps: training never draws these.
        return at.flat(perturbation.draw(1.0, step=-1 - batch, draw=draw))

    if fresh:
        for a in strengths:
            yield lambda batch, a=a: at.start + a * unit_noise(batch)
    else:
        θ = unit_noise(0)
        for a in strengths:
            w = at.start + a * θ
            yield lambda batch, w=w: w


def mean_of_rows(values: np.ndarray) -> np.ndarray:
    """The mean over the first axis; that of equal values, as at strength 0, is that value exactly."""
    with np.errstate(invalid="ignore"):
        centred = values[0] + (values - values[0]).mean(axis=0)
    return np.where(np.isfinite(values).all(axis=0), centred, values.mean(axis=0))


def slope(strengths: Sequence[float], losses: np.ndarray) -> float:
    """ΔC̄/Δa by least squares; NaN if the strengths are all the same."""
    if len(set(strengths)) == 1:  # their mean may be another number, by rounding
        return math.nan
    a = np.asarray(strengths) - np.mean(strengths)
    with np.errstate(invalid="ignore"):  # with an infinite loss it is infinite or NaN
        return float(a @ losses / (a @ a))


def _checked(strengths: Sequence[float]) -> tuple[float, ...]:
    values = tuple(map(check_strength, list_of_numbers("strengths", strengths, "[0.0, 0.01, 0.02]")))
    if not values:
        raise ValueError("strengths is empty: give at least one value of a, better a grid of them")
    return values


def _name(noise_or_scale: Any) -> str:
    return noise_or_scale if isinstance(noise_or_scale, str) else repr(noise_or_scale)
