"""The loss along the straight line between two checkpoints (the paper's Figure 2(a))."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from smoothout.batchnorm import update_bn
from smoothout.checks import list_of_numbers
from smoothout.measure.loss_at import AccuracyFunction, LossFunction, model_loss_at
from smoothout.measure.result import Progress, Result, no_progress
from smoothout.measure.untouched import forget_computed_weights


@dataclass(frozen=True)
class Interpolation(Result):
    """Loss and accuracy at α·w_b + (1 − α)·w_a; α = 0 is the first checkpoint, α = 1 the second."""

    alphas: tuple[float, ...]
    losses: tuple[float, ...]
    accuracies: tuple[float, ...] | None

    def plot(self, **options: Any) -> Any:
        """Loss, and accuracy on a second axis, along α, on matplotlib axes."""
        from smoothout.measure import plots

        return plots.plot_interpolation({"": self}, **options)


def interpolate(
    model: nn.Module,
    state_a: Mapping[str, Any],
    state_b: Mapping[str, Any],
    loss_fn: LossFunction,
    batches: Iterable[Any],
    alphas: Sequence[float],
    *,
    accuracy_fn: AccuracyFunction | None = None,
    batchnorm: Literal["interpolate", "recompute"] = "interpolate",
    train_mode: bool = False,
    progress: Progress | None = None,
) -> Interpolation:
    """The loss at α·w_b + (1 − α)·w_a for every α: the whole state, computed in float64 and rounded once.

    Args:
        model: gives the architecture; it ends exactly as it began.
        state_a, state_b: two `state_dict()`s of this architecture.
        loss_fn, batches, accuracy_fn, train_mode: see `measure.loss_at`.
        alphas: the paper has −1, −0.9, …, 2.
        batchnorm: `"interpolate"`: running statistics are interpolated like weights, as in the paper; a variance that
            would come out negative (α outside 0 … 1) is 0. `"recompute"`: measured anew on the batches at every α,
            which does not blame the weights for statistics that fit neither end. Whole numbers, such as
            `num_batches_tracked`, are those of the nearer end.
        progress: called with (α done, α in all).

    Returns:
        An `Interpolation`. With `"interpolate"` the ends are, bit for bit, what the two checkpoints give.

    Examples:
        >>> measure.interpolate(model, small_batch, large_batch, loss_fn, [batch], [i / 10 for i in range(-10, 21)])
    """
    if batchnorm not in ("interpolate", "recompute"):
        raise ValueError(f'batchnorm={batchnorm!r}: use "interpolate" or "recompute"')
    alphas = list_of_numbers("alphas", alphas, "[0.0, 0.5, 1.0]")
    if not alphas or not all(math.isfinite(α) for α in alphas):
        raise ValueError(f"alphas={alphas}: give at least one finite number")
    a, b = _checked(model, "state_a", state_a), _checked(model, "state_b", state_b)
    results = []
    with model_loss_at(
        model, loss_fn, batches, train_mode=train_mode, accuracy_fn=accuracy_fn, needs_parameters=False
    ) as at:
        # What state_dict() gives may be copies, as inside perturbed(): only load_state_dict() writes for sure.
        state = model.state_dict()
        tensors = {name for name, value in state.items() if isinstance(value, Tensor)}
        variances = {name for name in tensors if name.rpartition(".")[2] == "running_var"}
        for i, α in enumerate(alphas):
            for name in tensors:
                value = between(a[name], b[name], α)
                state[name] = (value.clamp_min(0) if name in variances else value).to(state[name].dtype)
            model.load_state_dict(state)
            forget_computed_weights()
            if batchnorm == "recompute":
                update_bn(model, at.each_batch(), forward=loss_fn)
            results.append(at.loss_and_accuracy())
            (progress or no_progress)(i + 1, len(alphas))
    losses, accuracies = zip(*results)
    return Interpolation(alphas, losses, None if None in accuracies else accuracies)


def between(a: Tensor, b: Tensor, α: float) -> Tensor:
    """α·b + (1 − α)·a in float64; the ends themselves at 0 and 1; whole numbers are those of the nearer end."""
    if α == 0.0 or α == 1.0 or not (a.is_floating_point() or a.is_complex()):
        return a if α < 0.5 else b
    dtype = torch.promote_types(a.dtype, torch.float64)  # complex128 for complex numbers
    return α * b.to(a.device, dtype) + (1 - α) * a.to(dtype)


def _checked(model: nn.Module, argument: str, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state of this architecture, with the same names and shapes, that writing to the model does not change."""
    if not isinstance(state, Mapping):
        raise TypeError(f"{argument} is a {type(state).__name__}: give a state_dict()")
    own = model.state_dict()
    for what, names in (("lacks", set(own) - set(state)), ("has, unlike the model,", set(state) - set(own))):
        if names:
            shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ValueError(f"{argument} is no state of this {type(model).__name__}: it {what} {shown}")
    for name, tensor in own.items():
        if not isinstance(tensor, Tensor):
            continue
        if not isinstance(value := state[name], Tensor):
            raise TypeError(f"{argument}[{name!r}] is a {type(value).__name__}: give tensors, as state_dict() does")
        if value.shape != tensor.shape:
            raise ValueError(
                f"{argument}[{name!r}] has shape {tuple(value.shape)}, the model's has {tuple(tensor.shape)}"
            )
    # Tensors of this very model, under whatever names, are about to be written to. Inside perturbed() those of its
    # state are copies.
    written = {t.data_ptr() for t in (*model.parameters(), *own.values()) if isinstance(t, Tensor)}
    return {
        name: value.clone() if isinstance(value, Tensor) and value.data_ptr() in written else value
        for name, value in state.items()
    }
