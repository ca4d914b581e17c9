"""A strength to start from, read off the sensitivity curve of a briefly trained model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from smoothout.checks import list_of_numbers, positive_number
from smoothout.filters import Scale
from smoothout.measure._sensitivity import Sensitivity, sensitivity
from smoothout.measure._sharpness import check_unit
from smoothout.measure.loss_at import LossFunction
from smoothout.measure.result import Progress, Result
from smoothout.noise import Noise
from smoothout.select import Predicate, not_normalisation

# From a thousandth to four, each √2 times the one before.
GRID = tuple(0.001 * 2 ** (i / 2) for i in range(25))


@dataclass(frozen=True)
class SuggestedStrength(Result):
    """A strength, and the curve it was read off. `float(result)` is the strength.

    Args:
        strength: a.
        base_loss: C(w), without noise.
        allowed_rise: C̄(w; a) − C(w) may be this large.
        curve: C̄(w; a) over the grid, from a = 0 on.
        message: how a was found, or why it lies at an end of the grid.
    """

    strength: float
    base_loss: float
    allowed_rise: float
    curve: Sensitivity
    message: str

    def __float__(self) -> float:
        return self.strength

    def __str__(self) -> str:
        return f"strength {self.strength:.4g}: {self.message}"

    @classmethod
    def _read(cls, name: str, value: Any) -> Any:
        return Sensitivity.from_json(value) if name == "curve" else super()._read(name, value)

    def plot(self, **options: Any) -> Any:
        """The curve, the allowed rise and the strength where they meet, on matplotlib axes."""
        from smoothout.measure import plots

        return plots.plot_suggested_strength(self, **options)


def suggest_strength(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    scale: str | Scale = "absolute",
    noise: str | Noise = "uniform",
    rise: float = 0.1,
    strengths: Sequence[float] = GRID,
    draws: int = 3,
    select: Predicate | None = None,
    seed: int = 0,
    train_mode: bool = False,
    progress: Progress | None = None,
) -> SuggestedStrength:
    """The largest a whose noise raises the loss by no more than a tenth of 1 + C: C̄(w; a) − C(w) ≤ rise·(1 + C(w)).

    The unit 1 + C is that of the sharpness: relative while the loss is large, absolute when it is near zero, so that
    the answer hardly depends on how long the model was trained. Train it for an epoch or two first: at the initial
    weights noise costs nothing, and the curve says nothing. Between two points of the grid the rise is a straight line
    in logarithms, and a is where that line meets the limit.

    This is where to start a search, not its end. On the digits, F1 after one, two and four epochs gives 0.033 to 0.036,
    where the paper has 0.0375; for AdaSmoothOut 0.50 to 0.56, where the paper is more careful with 0.15.

    Args:
        model, loss_fn, batches, train_mode: see `measure.loss_at`. A thousand or so training examples are enough.
        scale: `"absolute"` for `SmoothOut`, `"filter"` for `AdaSmoothOut`.
        noise: that of the training to come.
        rise: the allowed rise of the loss, in units of 1 + C.
        strengths: the grid, rising.
        draws: how many θ each point is the mean of.
        select: which parameters take noise; by default, as in training, all but those of normalisation layers.
        seed, progress: as those of `measure.sensitivity`.

    Returns:
        A `SuggestedStrength`.

    Examples:
        >>> smooth = SmoothOut(model, float(suggest_strength(model, loss_fn, [batch])))
    """
    grid, rise = _checked(strengths), positive_number("rise", rise, "0.1")
    curve = sensitivity(
        model,
        loss_fn,
        batches,
        (0.0, *grid),
        noise=noise,
        scale=scale,
        draws=draws,
        seed=seed,
        select=not_normalisation if select is None else select,
        train_mode=train_mode,
        progress=progress,
    )
    base_loss = curve.losses[0]
    check_unit(base_loss)
    allowed = rise * (1 + base_loss)
    strength, message = crossing(grid, [loss - base_loss for loss in curve.losses[1:]], allowed)
    return SuggestedStrength(strength, base_loss, allowed, curve, message)


def crossing(strengths: Sequence[float], rises: Sequence[float], allowed: float) -> tuple[float, str]:
    """Where the rise first goes above what is allowed: between two strengths, on a straight line in logarithms."""
    over = next((i for i, rise in enumerate(rises) if not rise <= allowed), None)  # NaN counts as above
    if over is None:
        return strengths[-1], "the largest strength of the grid still raises the loss by less than is allowed"
    if over == 0:
        return strengths[0], "even the smallest strength of the grid raises the loss by more than is allowed"
    (a, b), (low, high) = strengths[over - 1 : over + 1], rises[over - 1 : over + 1]
    if low <= 0 or not math.isfinite(high):
        return a, "the largest strength of the grid that raises the loss by less than is allowed"
    share = math.log(allowed / low) / math.log(high / low)
    return a * (b / a) ** share, "where the curve meets the allowed rise"


def _checked(strengths: Sequence[float]) -> tuple[float, ...]:
    grid = list_of_numbers("strengths", strengths, "[0.01, 0.02, 0.04]")
    if not grid or not all(a > 0 for a in grid) or any(a >= b for a, b in pairwise(grid)):
        raise ValueError(f"strengths={grid}: give positive numbers in rising order")
    return grid
