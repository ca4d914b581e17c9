"""The loss (and its gradient) at given parameters over given batches: what all measurements are made of.

`LossAt` is a function of one flat float64 vector. `FunctionLossAt` is an explicit one, so that every measurement can be
checked against a closed form; `model_loss_at` makes one of a model, a loss function and batches.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from smoothout.attach import paused
from smoothout.checks import check_model
from smoothout.measure.untouched import RandomState, alone, keep_workers, untouched
from smoothout.select import Predicate, Selected, everything, select_parameters

LossFunction = Callable[[nn.Module, Any], Tensor]
AccuracyFunction = Callable[[nn.Module, Any], Any]


class LossAt(Protocol):
    """A loss as a function of one flat vector in float64.

    `start` is the point that is measured. Vectors live on its device.
    """

    start: Tensor

    def loss(self, w: Tensor) -> float: ...

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]: ...

    def hessian_vector_product(self, w: Tensor, v: Tensor) -> Tensor: ...


class FunctionLossAt:
    """An explicit function of a float64 vector.

    Examples:
        >>> bowl = FunctionLossAt(lambda w: 0.5 * (w**2).sum(), torch.zeros(10))
    """

    def __init__(self, function: Callable[[Tensor], Tensor], start: Tensor) -> None:
        self.function, self.start = function, start.detach().to(torch.float64)

    def loss(self, w: Tensor) -> float:
        with torch.no_grad():
            return float(_scalar(self.function(w)).detach())

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            loss = _scalar(self.function(w))
            (gradient,) = _gradients(loss, [w])
        return float(loss.detach()), gradient

    def hessian_vector_product(self, w: Tensor, v: Tensor) -> Tensor:
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            (product,) = _second_derivatives(_scalar(self.function(w)), [w], [v])
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
        accuracy_fn: AccuracyFunction | None,
    ) -> None:
        self.model, self.loss_fn, self.batches = model, loss_fn, batches
        self.selected, self.accuracy_fn = selected, accuracy_fn
        self._random_state = random_state
        self._parameters = [s.parameter for s in selected]
        # In eval mode buffers do not change; those of inference mode cannot change outside it.
        buffers = [b for b in model.buffers() if not b.is_inference()] if model.training else []
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers]
        self._passes = 0
        self.start = self.flat(self._parameters)

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """One float64 vector out of tensors that are shaped like the selected parameters."""
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        parts = [t.detach().reshape(-1).to(device, torch.float64) for t in tensors]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    @torch.no_grad()
    def write(self, w: Tensor) -> None:
        """Put a vector into the parameters."""
        for parameter, values in zip(self._parameters, w.split([p.numel() for p in self._parameters])):
            parameter.copy_(values.view(parameter.shape))
        for buffer, values in self._buffers:
            buffer.copy_(values)
        torch.clear_autocast_cache()

    @torch.no_grad()
    def loss(self, w: Tensor) -> float:
        self.write(w)
        return self.mean_loss()

    @torch.no_grad()
    def mean_loss(self) -> float:
        """The mean loss at the parameters as they are."""
        mean = _Mean()
        for batch in self.each_batch():
            mean.add(self._loss_of(batch), weight_of(batch))
        return mean.value()

    @torch.no_grad()
    def loss_and_accuracy(self, w_of_batch: Callable[[int], Tensor] | None = None) -> tuple[float, float | None]:
        """Mean loss and accuracy at the parameters as they are, or at `w_of_batch(i)` for the i-th batch."""
        loss, accuracy = _Mean(), _Mean()
        for i, batch in enumerate(self.each_batch()):
            if w_of_batch is not None:
                self.write(w_of_batch(i))
            loss.add(self._loss_of(batch), weight_of(batch))
            right = None if self.accuracy_fn is None else self.accuracy_fn(self.model, batch)
            if right is not None:
                accuracy.add(_fraction(right), weight_of(batch))
        return loss.value(), _checked_accuracy(accuracy.value()) if accuracy.weight else None

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        self.write(w)
        loss, gradient, differentiable = _Mean(), _Mean(), False
        with torch.enable_grad(), _recurrent_derivatives(self.model):
            for batch in self.each_batch():
                batch_loss = self._loss_of(batch)
                differentiable |= batch_loss.requires_grad
                gradient.add(self.flat(_gradients(batch_loss, self._parameters)), weight_of(batch))
                loss.add(batch_loss.detach(), weight_of(batch))
        self._check_graph(differentiable, w)
        return loss.value(), gradient.tensor()

    def hessian_vector_product(self, w: Tensor, v: Tensor) -> Tensor:
        self.write(w)
        direction = [
            values.view(p.shape).to(p.device, p.dtype)
            for p, values in zip(self._parameters, v.split([p.numel() for p in self._parameters]))
        ]
        product, differentiable = _Mean(), False
        with torch.enable_grad(), _recurrent_derivatives(self.model), _second_order():
            for batch in self.each_batch():
                batch_loss = self._loss_of(batch)
                differentiable |= batch_loss.requires_grad
                product.add(self.flat(_second_derivatives(batch_loss, self._parameters, direction)), weight_of(batch))
        self._check_graph(differentiable, w)
        return product.tensor()

    def _check_graph(self, differentiable: bool, w: Tensor) -> None:
        """Of a constant the gradient is zero; a loss that lost its graph on the way would only pass for flat."""
        if not differentiable and self.loss(w) != self.loss(1.01 * w + 0.01):
            raise ValueError(
                "loss_fn(model, batch) returned a loss without a graph, as under torch.no_grad() or after detach(): "
                "give one that backward() can be called on"
            )

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
            return _scalar(self.loss_fn(self.model, batch))
        except Exception as error:
            if isinstance(batch, Tensor):
                error.add_note("batches gave a tensor as a batch: if they are one batch themselves, give [batch]")
            raise

    def each_batch(self) -> Iterator[Any]:
        """One pass over the batches, from the same random state each time."""
        self._random_state.put_back()
        keep_workers(self.batches, None)  # those that stay have generators that go on: new ones for each pass
        count = 0
        for count, batch in enumerate(self.batches, start=1):  # noqa: B007
            yield batch
        self._passes += 1
        if not count:
            raise ValueError(
                "batches is empty: nothing to measure the loss on"
                if self._passes == 1
                else f"batches gave nothing in pass {self._passes}: they are exhausted. Several passes are needed: "
                "give a list or a DataLoader, which start anew each time"
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
    with torch.inference_mode(False), paused(model), alone(model), untouched(model, batches) as random_state:
        _set_mode(model, train_mode)
        yield ModelLossAt(model, loss_fn, batches, selected, random_state, accuracy_fn)


def _set_mode(model: nn.Module, train_mode: bool) -> None:
    """Training mode as the model has it: its `train()` may leave some layers out. Eval mode without asking the model:
    layers whose `eval()` merges weights (loralib's) would be measured without the weights that train, and would stay
    merged when those are put back.
    """
    if train_mode:
        model.train()
    else:
        for module in model.modules():
            module.training = False


def check_batches(batches: Any) -> None:
    """Something to go through several times."""
    if isinstance(batches, Iterator):
        raise ValueError(
            f"batches is a {type(batches).__name__}, an iterator: it is exhausted after one pass, if not already. "
            "Several passes are needed: give a list or a DataLoader, which start anew each time"
        )
    if isinstance(batches, Mapping):
        raise TypeError(f"batches is a {type(batches).__name__}, one batch? Give a list of batches: [batch]")
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise TypeError(f"batches is a {type(batches).__name__}: give a list of batches or a DataLoader")


def weight_of(batch: Any) -> int:
    """The length of the batch's first tensor, 1 if it has none."""
    first = next(_tensors(batch), None)
    return len(first) if first is not None and first.ndim else 1


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):  # such as Transformers' BatchEncoding, which is no dict
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from _tensors(value)


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
    return fraction


def _checked_accuracy(mean: float) -> float:
    """The mean over batches, at once: to look at every batch would be to wait for the device."""
    if mean < -1e-6 or mean > 1.0 + 1e-6:
        raise ValueError(
            f"accuracy_fn(model, batch) returned {mean:g} on average: give the fraction right, from 0 to 1, "
            "neither a count nor per cent"
        )
    return mean


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"loss_fn(model, batch) returned {found}: give a scalar tensor, the mean loss of the batch")
    return loss.reshape(())


@contextmanager
def _recurrent_derivatives(model: nn.Module) -> Iterator[None]:
    """cuDNN's recurrent layers have no derivative in eval mode, and no second one in any: torch's own stand in."""
    cudnn = torch.backends.cudnn
    before = cudnn.enabled
    try:
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            cudnn.enabled = False
        yield
    finally:
        cudnn.enabled = before


@contextmanager
def _second_order() -> Iterator[None]:
    """Fused attention kernels and compiled code have no second derivative: inside, neither is used."""
    compiler_loaded = "torch._dynamo" in sys.modules  # to load it takes seconds
    with sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager") if compiler_loaded else nullcontext():
        yield


def _gradients(loss: Tensor, inputs: list[Any], create_graph: bool = False) -> list[Tensor]:
    """∂loss/∂inputs without touching `.grad`; zero for what the loss does not depend on."""
    if not loss.requires_grad:
        return [torch.zeros_like(p) for p in inputs]
    gradients = torch.autograd.grad(loss, inputs, create_graph=create_graph, allow_unused=True)
    # An embedding with sparse=True has sparse gradients.
    return [torch.zeros_like(p) if g is None else g.to_dense() for g, p in zip(gradients, inputs)]


def _second_derivatives(loss: Tensor, inputs: list[Any], direction: list[Tensor]) -> list[Tensor]:
    """H·v by differentiating ∇loss·v."""
    gradients = _gradients(loss, inputs, create_graph=True)
    along = [(g * v).sum() for g, v in zip(gradients, direction)]
    return _gradients(torch.stack([a.to(along[0]) for a in along]).sum(), inputs)
