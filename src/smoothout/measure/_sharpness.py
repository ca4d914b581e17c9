"""(C_ε, A)-sharpness of Keskar et al. (2017), the paper's measure of a minimum."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor, nn

from smoothout.checks import positive_number, seed_number, whole_number
from smoothout.filters import filter_layout, filter_norms
from smoothout.measure.box_maximum import Box, NotFinite, Point, Status, Trial, climb
from smoothout.measure.loss_at import LossAt, LossFunction, ModelLossAt, model_loss_at
from smoothout.measure.result import Progress, Result, no_progress
from smoothout.select import Predicate

Method = Literal["auto", "lbfgsb", "ascent"]
# SciPy's workspace takes 200 bytes a parameter: 400 MB here, 2.3 GB for ResNet18.
LARGEST_FOR_LBFGSB = 2_000_000


@dataclass(frozen=True)
class Sharpness(Result):
    """How far the loss can rise in a small box around the weights, in per cent: 100·(max f − f)/(1 + f).

    Every value is a lower bound, for the maximum over a box is found by local searches.

    Args:
        value: over the best start. NaN, never 0, if every start failed.
        mean: over all starts that count.
        trials: the value of each start that counts; one that made no move does not.
        base_loss, max_loss: f, and the largest f found.
        status: of the best start: `"converged"` (stopped by tolerance), `"iteration limit"` (the paper's protocol, no
            failure) or `"failed"`; `"failed"` also if any start met a loss that is not finite.
        message: what the solver said.
        evaluations: of the loss with its gradient, over all batches.
    """

    value: float
    mean: float
    trials: tuple[float, ...]
    base_loss: float
    max_loss: float
    status: Status
    message: str
    evaluations: int

    @property
    def converged(self) -> bool:
        """Whether the best start was stopped by tolerance."""
        return self.status == "converged"

    def plot(self, **options: Any) -> Any:
        """The trials and their maximum, on matplotlib axes."""
        from smoothout.measure import plots

        return plots.plot_sharpness({"": self}, **options)


def sharpness(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    epsilon: float = 5e-4,
    subspace: int | None = None,
    restarts: int = 5,
    max_iterations: int = 10,
    seed: int = 0,
    method: Method = "auto",
    scale: Literal["absolute", "filter"] = "absolute",
    select: Predicate | None = None,
    train_mode: bool = False,
    progress: Progress | None = None,
) -> Sharpness:
    """100·(max f(w + A·y) − f(w))/(1 + f(w)) over the box |yᵢ| ≤ ε·(|(Aᵀw)ᵢ| + 1), as in the paper.

    Args:
        model, loss_fn, batches, select, train_mode: see `measure.loss_at`. The definition is over all of w, so that by
            default BatchNorm's parameters are moved, too. The paper measures on training data.
        epsilon: ε, the size of the box.
        subspace: p: A is n × p, random with orthonormal columns, and takes 8·n·p bytes. By default A = I, all of space.
        restarts: the number of starts: the first at w itself, the others random inside the box.
        max_iterations: of the solver, for each start; each is then polished to a vertex for as long as the loss rises.
        seed: of the starts and of A. The generator is private.
        method: `"lbfgsb"` (SciPy, float64, on the CPU); `"ascent"`, projected gradient and vertex steps that stay on
            the model's device; `"auto"`: L-BFGS-B up to two million parameters.
        scale: `"filter"` makes the box relative, |yᵢ| ≤ ε·‖w_filter(i)‖: a filter that BatchNorm follows may be
            multiplied by ten, which changes nothing that the network computes, and the value stays what it was.
        progress: called with (starts done, starts in all).

    Returns:
        A `Sharpness`. `print(result.value, result.status)`.

    Examples:
        >>> batch = (images, labels)
        >>> measure.sharpness(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), [batch]).value
    """
    if scale not in ("absolute", "filter"):
        raise ValueError(f'scale={scale!r}: use "absolute", or "filter" for a box relative to filter norms')
    if scale == "filter" and subspace is not None:
        raise ValueError(
            f'scale="filter" with subspace={subspace}: filters have no norms in a subspace; choose one of them'
        )
    seed = seed_number(seed)
    with model_loss_at(model, loss_fn, batches, select=select, train_mode=train_mode) as at:
        at.warn_of_shared_memory()
        at.base_loss()  # says which batch, if it is not finite
        sizes = at.flat(_filter_sizes(at)) if scale == "filter" else None
        basis = None if subspace is None else random_basis(len(at.start), subspace, seed, at.start.device)
        result = sharpness_at(
            at,
            epsilon=epsilon,
            basis=basis,
            relative_bounds=sizes,
            restarts=restarts,
            max_iterations=max_iterations,
            seed=seed,
            method=method,
            progress=progress,
        )
        _warn_of_coarse_weights(at, epsilon * _reach(at, sizes, basis))
    return result


def sharpness_at(
    at: LossAt,
    *,
    epsilon: float = 5e-4,
    basis: Tensor | None = None,
    relative_bounds: Tensor | None = None,
    restarts: int = 5,
    max_iterations: int = 10,
    seed: int = 0,
    method: Method = "auto",
    progress: Progress | None = None,
) -> Sharpness:
    """The sharpness of any `LossAt`.

    Args:
        basis: A, with orthonormal columns (any: random, or some columns of the identity).
        relative_bounds: box half-widths in units of ε; by default |Aᵀw| + 1.
    """
    epsilon, seed = positive_number("epsilon", epsilon, "5e-4"), seed_number(seed)
    restarts, max_iterations = whole_number("restarts", restarts), whole_number("max_iterations", max_iterations)
    if method not in ("auto", "lbfgsb", "ascent"):
        raise ValueError(f'method={method!r}: use "auto", "lbfgsb" or "ascent"')
    if relative_bounds is None:
        relative_bounds = (at.start if basis is None else basis.T @ at.start).abs() + 1
    if method == "auto":
        method = "lbfgsb" if len(relative_bounds) <= LARGEST_FOR_LBFGSB else "ascent"
    box = Box(at, epsilon * relative_bounds, basis)
    try:
        centre = box.evaluate(box.centre)
    except NotFinite as error:
        raise ValueError(f"the loss at the start is not finite: {error}") from None
    check_unit(centre.loss)
    # Seeds of their own: where a start begins does not depend on what the starts before it met.
    seeds = torch.randint(2**62, (restarts,), generator=torch.Generator("cpu").manual_seed(seed), device="cpu").tolist()
    trials = []
    for i in range(restarts):
        generator = torch.Generator("cpu").manual_seed(seeds[i])
        try:
            start: Point = centre if i == 0 else box.evaluate(box.random_point(generator))
            trials.append(climb(box, centre.loss, start, method, max_iterations, generator, leap=i % 2 == 1))
        except NotFinite as error:
            trials.append(Trial(math.nan, False, False, "failed", str(error), finite=False))
        (progress or no_progress)(i + 1, restarts)
    return _summary(centre.loss, trials, box.evaluations)


def check_unit(base_loss: float) -> None:
    """Rises are measured in units of 1 + f, which must be positive: else the steepest rise would be the least value."""
    if base_loss <= -1.0:
        raise ValueError(
            f"the loss f = {base_loss:.6g} is not above −1 at the start: rises are measured in units of 1 + f, which "
            "must be positive; add a constant to the loss so that it is never negative"
        )


def _summary(base_loss: float, trials: list[Trial], evaluations: int) -> Sharpness:
    """Value, mean and status out of the trials. A start that made no move says nothing."""

    def value(loss: float) -> float:
        return 100 * (loss - base_loss) / (1 + base_loss)

    counted = [trial for trial in trials if trial.moved]
    if not counted and all(trial.flat and trial.finite for trial in trials):
        message = "the loss is flat: from no start is there a way up"
        return Sharpness(0.0, 0.0, (), base_loss, base_loss, "converged", message, evaluations)
    if not counted:
        message = "; ".join(dict.fromkeys(trial.message for trial in trials))
        return Sharpness(math.nan, math.nan, (), base_loss, math.nan, "failed", message, evaluations)
    best = max(counted, key=lambda trial: trial.loss)
    decisive = next((trial for trial in trials if not trial.finite), best)
    values = tuple(value(trial.loss) for trial in counted)
    max_loss = max(best.loss, base_loss)
    return Sharpness(
        value(max_loss), fmean(values), values, base_loss, max_loss, decisive.status, decisive.message, evaluations
    )


def random_basis(n: int, p: int, seed: int, device: torch.device) -> Tensor:
    """n × p with orthonormal columns, uniformly distributed: the Q of a Gaussian matrix, drawn on the CPU."""
    p = whole_number("subspace", p)
    if p > n:
        raise ValueError(f"subspace={p}: give a whole number between 1 and {n}, the number of parameters")
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, p, dtype=torch.float64, generator=generator, device="cpu").to(device)).Q


def _reach(at: ModelLossAt, sizes: Tensor | None, basis: Tensor | None) -> Tensor:
    """How far each weight can be moved, in units of ε. In a subspace of few dimensions it is far less than in all."""
    if basis is not None:
        return basis.abs() @ ((basis.T @ at.start).abs() + 1)
    return at.start.abs() + 1 if sizes is None else sizes


def _warn_of_coarse_weights(at: ModelLossAt, bounds: Tensor) -> None:
    """Points of the box are rounded to the weights' own dtype; bf16 and fp16 have few or none inside a small box."""
    steps = at.start.abs() * at.flat(
        [torch.full_like(s.parameter, torch.finfo(s.parameter.dtype).eps) for s in at.selected]
    )
    if share := float(((steps > bounds) & (bounds > 0)).double().mean()):
        warnings.warn(
            f"the box is narrower than the rounding of {share:.1%} of the weights, so that they stay or leave it: "
            "measure a copy of higher precision, copy.deepcopy(model).float(), or choose a larger epsilon",
            stacklevel=3,
        )


def _filter_sizes(at: ModelLossAt) -> list[Tensor]:
    """For every element the norm of the filter it belongs to; a row that never takes noise does not move."""
    sizes = []
    for selected in at.selected:
        parameter = selected.parameter
        layout = filter_layout(selected.layer, selected.layer_slot, parameter)
        size = filter_norms(parameter, layout).expand(parameter.shape).clone()
        if layout.clean_row is not None:
            size[layout.clean_row] = 0
        sizes.append(size)
    return sizes
