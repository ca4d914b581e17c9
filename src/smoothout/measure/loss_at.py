"""The loss (and its gradient) at given parameters over given batches: what all measurements are made of.

`LossAt` is a function of one flat float64 vector. `FunctionLossAt` is an explicit one, so that every measurement can be
checked against a closed form; `model_loss_at` makes one of a model, a loss function and batches.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from smoothout.attach import paused
from smoothout.blocks import overlap
from smoothout.checks import check_model, scalar_loss
from smoothout.measure.batches import alike, check_batches, sample_of, weight_of
from smoothout.measure.derivatives import gradients_of, recurrent_derivatives, second_derivatives, second_order
from smoothout.measure.untouched import (
    RandomState,
    alone,
    copy_back,
    forget_computed_weights,
    keep_workers,
    untouched,
    without_gradient_hooks,
)
from smoothout.select import Predicate, Selected, everything, select_parameters

LossFunction = Callable[[nn.Module, Any], Tensor]
AccuracyFunction = Callable[[nn.Module, Any], Any]

SMALL_BUFFER = 2**20  # elements


class LossAt(Protocol):
    """A loss as a function of one flat vector in float64.

    `start` is the point that is measured. Vectors live on its device.
    """

    start: Tensor

    def loss(self, w: Tensor) -> float: ...

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]: ...

    def hessian_vector_product(self, w: Tensor, v: Tensor) -> Tensor: ...


class FunctionLossAt:
    """An explicit function of a float64 vector. Vectors of inference mode, which no graph takes, are copied.

    Examples:
        >>> bowl = FunctionLossAt(lambda w: 0.5 * (w**2).sum(), torch.zeros(10))
    """

    def __init__(self, function: Callable[[Tensor], Tensor], start: Tensor) -> None:
        self.function, self.start = function, start.detach().to(torch.float64)

    def loss(self, w: Tensor) -> float:
        with torch.no_grad():
            return float(scalar_loss(self.function(w)).detach())

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        with torch.inference_mode(False), torch.enable_grad():
            w = w.detach().clone().requires_grad_()
            loss = scalar_loss(self.function(w))
            (gradient,) = gradients_of(loss, [w])
        return float(loss.detach()), gradient

    def hessian_vector_product(self, w: Tensor, v: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            w = w.detach().clone().requires_grad_()
            (product,) = second_derivatives(scalar_loss(self.function(w)), [w], [v.clone()])
        return product


class ModelLossAt:
    """The mean loss of a model over batches, as a function of its selected parameters. Made by `model_loss_at`.

    The vector is float64 and rounded once to each parameter's own dtype; the model computes in its own precision;
    batches and their gradients are averaged in float64. Every evaluation starts from the same random state and buffers:
    dropout masks, shuffled loaders and spectral norm's vectors, which training mode moves, are the same each time, so
    that this is a function and not a random variable.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batches: Iterable[Any],
        selected: list[Selected],
        random_state: RandomState,
        buffers: list[tuple[Tensor, Tensor]],
        accuracy_fn: AccuracyFunction | None,
    ) -> None:
        self.model, self.loss_fn, self.batches = model, loss_fn, batches
        self.selected, self.accuracy_fn = selected, accuracy_fn
        self._random_state = random_state
        self._parameters = [s.parameter for s in selected]
        self._buffers, self._versions = buffers, [buffer._version for buffer, _ in buffers]
        self._passes, self._graph_is_checked, self._batches_change = 0, False, False
        self._first_batch: list[Tensor] | None = None
        self.start = self.flat(self._parameters)

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """One float64 vector out of tensors that are shaped like the selected parameters."""
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        parts = [t.detach().reshape(-1).to(device, torch.float64) for t in tensors]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def _parts(self, w: Tensor) -> list[Tensor]:
        """The way back: one tensor for each parameter, with its shape."""
        parts = w.split([p.numel() for p in self._parameters])
        return [values.view(p.shape) for p, values in zip(self._parameters, parts)]

    @torch.no_grad()
    def write(self, w: Tensor) -> None:
        """Put a vector into the parameters."""
        for parameter, values in zip(self._parameters, self._parts(w)):
            parameter.copy_(values)
        self._put_buffers_back()
        forget_computed_weights()

    def _put_buffers_back(self) -> None:
        """Small ones always: kernels of BatchNorm and of quantisation's observers write without counting a version.
        Large ones, which may be a quantised model's weights, only if they were written to.
        """
        for i, (buffer, values) in enumerate(self._buffers):
            if values.numel() <= SMALL_BUFFER or buffer._version != self._versions[i]:
                copy_back(buffer, values)
                self._versions[i] = buffer._version

    @torch.no_grad()
    def loss(self, w: Tensor) -> float:
        self.write(w)
        return self.mean_loss()

    @torch.no_grad()
    def mean_loss(self) -> float:
        """The mean loss at the parameters as they are."""
        mean = _Mean()
        for batch in self.each_batch():
            weight = weight_of(batch)
            mean.add(self._loss_of(batch), weight)
        return mean.value()

    @torch.no_grad()
    def loss_and_accuracy(self, w_of_batch: Callable[[int], Tensor] | None = None) -> tuple[float, float | None]:
        """Mean loss and accuracy at the parameters as they are, or at `w_of_batch(i)` for the i-th batch."""
        loss, accuracy = _Mean(), _Mean()
        for i, batch in enumerate(self.each_batch()):
            if w_of_batch is not None:
                self.write(w_of_batch(i))
            weight = weight_of(batch)  # before loss_fn, which may pop() what the batch has
            loss.add(self._loss_of(batch), weight)
            right = None if self.accuracy_fn is None else self.accuracy_fn(self.model, batch)
            if right is not None:
                accuracy.add(_fraction(right), weight)
        return loss.value(), _checked_accuracy(accuracy.value()) if accuracy.weight else None

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        self.write(w)
        loss, gradient, reached = _Mean(), _Mean(), set[int]()
        with torch.enable_grad(), recurrent_derivatives(self.model):
            for batch in self.each_batch():
                weight, batch_loss = weight_of(batch), self._loss_of(batch)
                gradient.add(self.flat(gradients_of(batch_loss, self._parameters, reached=reached)), weight)
                loss.add(batch_loss, weight)
        self._check_graph(reached, w)
        return loss.value(), gradient.tensor()

    def hessian_vector_product(self, w: Tensor, v: Tensor) -> Tensor:
        self.write(w)
        direction = [values.to(p.device, p.dtype) for p, values in zip(self._parameters, self._parts(v))]
        product, reached = _Mean(), set[int]()
        with torch.enable_grad(), recurrent_derivatives(self.model), second_order():
            for batch in self.each_batch():
                weight, batch_loss = weight_of(batch), self._loss_of(batch)
                parts = second_derivatives(batch_loss, self._parameters, direction, reached)
                product.add(self.flat(parts), weight)
        self._check_graph(reached, w)
        return product.tensor()

    def _check_graph(self, reached: set[int], w: Tensor) -> None:
        """Tell of parameters that no gradient comes to, if the loss depends on them: they would pass for flat."""
        lost = [s for i, s in enumerate(self.selected) if i not in reached]
        if not lost or self._graph_is_checked:
            return
        moved = self.flat([torch.full_like(s.parameter, i not in reached) for i, s in enumerate(self.selected)])
        before, after = self.loss(w), self.loss(w + moved * (0.01 * w + 0.01))
        self._graph_is_checked = not math.isnan(before)
        if abs(after - before) <= 1e-6 * abs(before) or math.isnan(before):
            return
        if not reached:
            raise ValueError(
                "loss_fn(model, batch) returned a loss without a graph, as under torch.no_grad() or after detach(): "
                "give one that backward() can be called on"
            )
        if self._batches_change:
            return  # which was told; the loss differs by that
        shown = ", ".join(s.name for s in lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        warnings.warn(
            f"no gradient comes to {shown}, as under torch.no_grad() or after detach(), but the loss depends on some: "
            "curvature takes these for flat, and sharpness is too small. Leave out what does not train, by "
            "requires_grad_(False) or select",
            stacklevel=2,
        )

    def warn_of_shared_memory(self) -> None:
        """Where two share memory only the one written last is moved, and each has a part of the gradient."""
        if overlap(self._parameters) and not self._moves_apart():
            warnings.warn(
                "measured parameters share memory, so that they are not moved apart and the result is wrong: tie "
                "weights as one parameter (b.weight = a.weight), not by their .data",
                stacklevel=3,
            )

    def _moves_apart(self) -> bool:
        """Whether weights hold what is written to them, as columns of one matrix do, though their spans overlap."""
        # Whole numbers that are exact in every dtype.
        probe = torch.randint(256, self.start.shape, dtype=torch.float64, device=self.start.device)
        self.write(probe)
        return torch.equal(self.flat(self._parameters), probe)

    def base_loss(self) -> float:
        """The loss at the start, which must be a finite number."""
        self.write(self.start)
        value = self.mean_loss()
        if not math.isfinite(value):
            raise ValueError(f"the loss at the start is {value}: {self._first_bad_batch()}")
        return value

    @torch.no_grad()
    def _first_bad_batch(self) -> str:
        for i, batch in enumerate(self.each_batch()):
            if not math.isfinite(loss := float(self._loss_of(batch))):
                return f"batch {i} gives {loss}; flatness is measured at a point where the loss is finite"
        return "though every batch alone gives a finite one"

    def _loss_of(self, batch: Any) -> Tensor:
        try:
            return scalar_loss(self.loss_fn(self.model, batch))
        except Exception as error:
            if isinstance(batch, Tensor):
                error.add_note("batches gave a tensor as a batch: if they are one batch themselves, give [batch]")
            raise

    def each_batch(self) -> Iterator[Any]:
        """One pass over the batches, from the same random state each time."""
        self._random_state.put_back()
        keep_workers(self.batches, None)  # those that stay have generators that go on: new ones for each pass
        count = 0
        for count, batch in enumerate(self.batches, start=1):
            if count == 1:
                self._check_first_batch(batch)
            yield batch
        self._passes += 1
        if not count:
            raise ValueError(
                "batches is empty: nothing to measure the loss on"
                if self._passes == 1
                else f"batches gave nothing in pass {self._passes}: they are exhausted. Several passes are needed: "
                "give a list or a DataLoader, which start anew each time"
            )

    def _check_first_batch(self, batch: Any) -> None:
        """Tell of data that change from pass to pass: then the loss is no function of the weights."""
        sample = sample_of(batch)
        if self._first_batch is None:
            self._first_batch = sample
        elif not self._batches_change and not alike(self._first_batch, sample):
            self._batches_change = True
            warnings.warn(
                "the first batch is another one than in the first pass over the batches, so that losses differ by "
                "their data, too: results are mostly noise, unless only the order changes. Random numbers of torch, "
                "NumPy and Python start anew in each pass, those of a generator that a dataset keeps do not, and a "
                "stream goes on: give a list of batches, and a loss_fn that does not write to them",
                stacklevel=2,
            )


@contextmanager
def model_loss_at(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    select: Predicate | None = None,
    train_mode: bool = False,
    accuracy_fn: AccuracyFunction | None = None,
    needs_parameters: bool = True,
) -> Iterator[ModelLossAt]:
    """The loss of a model as a function of its parameters; at the exit the model is as it was in every respect.

    Args:
        model: any module. Parameters, buffers, `.grad`s, modes and all generators are put back on every way out.
        loss_fn: `loss_fn(model, batch)`, the mean loss of the batch as a scalar tensor.
        batches: a list or a loader, gone through once for each evaluation. A batch weighs as much as its first tensor
            is long, 1 if it has none. A list of batches on the model's device is fastest.
        select: predicate (name, parameter, module) → bool; by default every trainable floating-point parameter.
        train_mode: evaluate in training mode (BatchNorm by batch statistics, dropout with the same masks each time).
        accuracy_fn: `accuracy_fn(model, batch)`, the fraction right or None.
        needs_parameters: whether a model with nothing selected is an error.
    """
    check_model(model)
    check_batches(batches)
    for name, function in (("loss_fn", loss_fn), ("accuracy_fn", accuracy_fn)):
        if not callable(function) and not (name == "accuracy_fn" and function is None):
            raise TypeError(f"{name}={function!r} is not callable: give a function of (model, batch)")
    if isinstance(loss_fn, nn.modules.loss._Loss) or getattr(loss_fn, "__module__", "") == "torch.nn.functional":
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise TypeError(
            f"loss_fn is torch's {name}, of outputs and targets: give a function of (model, batch), such as "
            "lambda model, batch: criterion(model(batch[0]), batch[1])"
        )
    selected = select_parameters(model, everything if select is None else select)
    if not selected and needs_parameters:
        raise ValueError(
            f"nothing to measure in {type(model).__name__}: no trainable floating-point parameter is selected"
        )
    if any(hasattr(s.parameter, "_local_tensor") for s in selected):
        raise ValueError("model is sharded (DTensor parameters): measure a full copy of it in one process")
    with (
        torch.inference_mode(False),
        paused(model),
        alone(model),
        without_gradient_hooks(model),
        untouched(model, batches) as (random_state, buffers),
    ):
        _set_mode(model, train_mode)
        yield ModelLossAt(model, loss_fn, batches, selected, random_state, buffers, accuracy_fn)


def _set_mode(model: nn.Module, train_mode: bool) -> None:
    """Training mode by the model's own `train()`, which may leave some layers out; eval mode flag by flag.

    A layer whose `eval()` merges weights (loralib's) would be measured without the weights that train, and would stay
    merged when those are put back.
    """
    if train_mode:
        model.train()
    else:
        for module in model.modules():
            module.training = False


class _Mean:
    """A weighted mean in float64 that stays on the device. The mean of one batch is that batch's value, bit for bit."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._only: Tensor | None = None
        self.weight = 0

    def add(self, value: Tensor, weight: int) -> None:
        value = value.detach().to(torch.float64)
        self._only = value if self._total is None else None
        self._total = (
            value * weight if self._total is None else self._total.add_(value.to(self._total.device), alpha=weight)
        )
        self.weight += weight

    def tensor(self) -> Tensor:
        assert self._total is not None
        return self._total / self.weight if self._only is None else self._only

    def value(self) -> float:
        return float(self.tensor())


def _fraction(right: Any) -> Tensor:
    fraction = torch.as_tensor(right, dtype=torch.float64)
    if fraction.numel() != 1:
        raise ValueError(
            f"accuracy_fn(model, batch) returned a tensor of shape {tuple(fraction.shape)}: give the fraction right, "
            "the .float().mean() of it"
        )
    return fraction.reshape(())


def _checked_accuracy(mean: float) -> float:
    """The mean over batches, at once: to look at every batch would be to wait for the device."""
    if mean < -1e-6 or mean > 1.0 + 1e-6:
        raise ValueError(
            f"accuracy_fn(model, batch) returned {mean:g} on average: give the fraction right, from 0 to 1, "
            "neither a count nor per cent"
        )
    return mean
