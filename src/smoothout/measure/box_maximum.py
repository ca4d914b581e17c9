"""The largest loss in a box around a point: L-BFGS-B, or an ascent that stays on the device, and a vertex polish.

Both solve max f(w + A·(b·z)) over z ∈ [−1, 1]ᵖ. In z the box is a cube whatever the bounds b are, so that the solvers
see the same problem before and after a rescaling of the weights. The maximum of a convex function lies at a vertex;
which vertex is a combinatorial question, so that every answer is a lower bound, and several starts are made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from smoothout.measure.loss_at import LossAt

Status = Literal["converged", "iteration limit", "failed"]
Outcome = tuple[Status, str]

SUFFICIENT_RISE = 1e-4  # a step must gain this fraction of what the gradient promises
NEGLIGIBLE_RISE = 1e-4  # relative to the rise so far: less ends a climb
OPTIMAL_GAP = 1e-3  # relative to the rise so far: the most that the gradient may still promise at a maximum
LINE_LIMIT = 10  # lengths tried along one gradient
POLISH_LIMIT = 100  # vertex steps; a handful is usual
FLIP_LIMIT = 32  # dimensions up to which single coordinates are flipped, too


class Point(NamedTuple):
    """A point of the cube, the loss there and its gradient with respect to z."""

    z: Tensor
    loss: float
    gradient: Tensor


class NotFinite(ArithmeticError):
    """The loss is NaN or infinite at a point of the box."""


class Box:
    """f(w + A·(b·z)) for z in the cube [−1, 1]ᵖ. Counts its evaluations.

    Args:
        at: f and w.
        bounds: b, not negative.
        basis: A, n × p with orthonormal columns; None is the identity.
    """

    def __init__(self, at: LossAt, bounds: Tensor, basis: Tensor | None = None) -> None:
        self._at, self._bounds, self._basis = at, bounds, basis
        self.evaluations = 0

    @property
    def centre(self) -> Tensor:
        return torch.zeros_like(self._bounds)

    def random_point(self, generator: torch.Generator) -> Tensor:
        """Uniform in the cube; drawn on the CPU, so that every device starts at the same points."""
        z = torch.rand(len(self._bounds), dtype=torch.float64, generator=generator, device="cpu")
        return z.mul_(2).sub_(1).to(self._bounds.device)

    def evaluate(self, z: Tensor) -> Point:
        y = self._bounds * z
        loss, gradient = self._at.loss_and_gradient(self._at.start + (y if self._basis is None else self._basis @ y))
        self.evaluations += 1
        if not math.isfinite(loss):
            if z.isnan().any():  # it was a gradient that led the solver there
                raise NotFinite("the gradient is not finite at a point of the box, where the loss is")
            raise NotFinite(f"the loss is {loss} at a point of the box")
        return Point(z, loss, self._bounds * (gradient if self._basis is None else self._basis.T @ gradient))


@dataclass(frozen=True)
class Trial:
    """Where one start ended: the highest loss that it saw."""

    loss: float
    moved: bool
    flat: bool  # the gradient was exactly zero where it began
    status: Status
    message: str
    finite: bool = True  # False: it met a loss that is NaN or infinite, and ended there


class _Climb:
    """The points of one start: remembers the best, and how far it is above the centre of the box."""

    def __init__(self, box: Box, base_loss: float, start: Point) -> None:
        self._box, self._base_loss, self.start = box, base_loss, start
        self.best = start

    def evaluate(self, z: Tensor) -> Point:
        point = self._box.evaluate(z)
        if point.loss > self.best.loss:
            self.best = point
        return point

    @property
    def rise(self) -> float:
        return abs(self.best.loss - self._base_loss)

    def gap(self) -> float:
        """The most that any step inside the cube can gain at the best point, to first order."""
        z, _, gradient = self.best
        return float(gradient.abs().sum() - gradient @ z)

    def rises(self, candidate: Tensor) -> bool:
        """Go there; whether that is a rise worth going on from."""
        before = self.best.loss
        return self.evaluate(candidate).loss > before + NEGLIGIBLE_RISE * self.rise


def climb(
    box: Box,
    base_loss: float,
    start: Point,
    solver: Literal["lbfgsb", "ascent"],
    max_iterations: int,
    generator: torch.Generator,
    leap: bool = False,
) -> Trial:
    """One start: solve, then polish to a vertex. A failure on the way does not lose what was found before it.

    With `leap` the solver begins at the vertex that the gradient points to, if it is higher. In many dimensions all
    random starts lead to one maximum; a leap and a gradual climb may lead to two.
    """
    path = _Climb(box, base_loss, start)
    flat = not bool(start.gradient.any())
    status, message = "converged", "the gradient is zero"
    try:
        if leap:
            path.evaluate(start.gradient.sign())
        if path.best.gradient.any():
            status, message = (_lbfgsb if solver == "lbfgsb" else _ascent)(path, max_iterations)
        _polish(path, generator)
    except NotFinite as error:
        return Trial(path.best.loss, path.best is not start, flat, "failed", str(error), finite=False)
    if status != "converged" and path.gap() <= OPTIMAL_GAP * path.rise:
        status, message = "converged", f"{message}; no step can raise the loss further, to first order"
    return Trial(path.best.loss, path.best is not start, flat, status, message)


def _lbfgsb(path: _Climb, max_iterations: int) -> Outcome:
    """SciPy's L-BFGS-B on −f, with the gradient of −f, in units in which a first step crosses about half the cube."""
    from scipy.optimize import fmin_l_bfgs_b

    z, base, gradient = path.best
    unit = float(gradient.abs().mean())

    def downhill(z_array: np.ndarray) -> tuple[float, np.ndarray]:
        # A copy: SciPy writes into its array, and the best point is kept.
        point = path.evaluate(torch.from_numpy(z_array.copy()).to(z.device))
        return (base - point.loss) / unit, (-point.gradient / unit).cpu().numpy()

    # `minimize` would do the same, and convert a million bounds once more in a Python loop.
    cube = [(-1.0, 1.0)] * len(z)
    _, _, facts = fmin_l_bfgs_b(downhill, z.cpu().numpy(), bounds=cube, maxiter=max_iterations)
    statuses: tuple[Status, ...] = ("converged", "iteration limit", "failed")
    return statuses[facts["warnflag"]], f"L-BFGS-B: {facts['task']}"


def _ascent(path: _Climb, max_iterations: int) -> Outcome:
    """Projected gradient steps; when even long ones rise, all the way to the vertex that the gradient points to."""
    length = 1.0
    for _ in range(max_iterations):
        before = path.best
        if path.gap() <= NEGLIGIBLE_RISE * path.rise:
            return "converged", "ascent: no step can raise the loss further, to first order"
        length = 4 * _line_search(path, before, length)
        if length == 0.0:
            return "failed", "ascent: no step along the gradient raises the loss"
        if path.best.loss - before.loss <= NEGLIGIBLE_RISE * path.rise:
            return "converged", "ascent: the loss rises no further"
    return "iteration limit", f"ascent: stopped after {max_iterations} iterations"


def _line_search(path: _Climb, start: Point, length: float) -> float:
    """The first of length, length/4, … whose projected step rises enough; 0 if none does."""
    z, loss, gradient = start
    uphill = gradient / gradient.abs().mean()
    for _ in range(LINE_LIMIT):
        candidate = (z + length * uphill).clamp_(-1, 1)
        if path.evaluate(candidate).loss >= loss + SUFFICIENT_RISE * float(gradient @ (candidate - z)):
            return length
        length /= 4
    return 0.0


def _polish(path: _Climb, generator: torch.Generator) -> None:
    """z ← sign(∇f) for as long as f rises; where the gradient is zero, as it is at a minimum, a random sign."""
    for _ in range(POLISH_LIMIT):
        z, _, gradient = path.best
        vertex = gradient.sign()
        undecided = vertex == 0
        if undecided.any():
            random_signs = torch.randint(0, 2, (len(z),), generator=generator, device="cpu").mul_(2).sub_(1).to(z)
            vertex = torch.where(undecided & (z.abs() < 1), random_signs, torch.where(undecided, z, vertex))
        risen = not torch.equal(vertex, z) and path.rises(vertex)
        if not risen and (len(z) > FLIP_LIMIT or not _flip_one(path)):
            return


def _flip_one(path: _Climb) -> bool:
    """Go to the best of the points that differ in the sign of one coordinate; whether that is a rise."""
    best = path.best
    for i in best.z.nonzero():
        candidate = best.z.clone()
        candidate[i] *= -1
        path.evaluate(candidate)
    return path.best.loss > best.loss + NEGLIGIBLE_RISE * path.rise
