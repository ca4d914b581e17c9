"""BatchNorm statistics under noise.

The policy, as in the paper: noisy forward passes update the running statistics, evaluation uses them with clean
weights. `frozen_statistics` leaves them alone instead; `update_bn` measures them anew at the clean weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


def _tracking(model: nn.Module) -> list[_BatchNorm]:
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Forward passes inside normalise by their batch, as in training, but leave the running statistics alone.

    Examples:
        >>> with smooth.perturbed(), frozen_statistics(model):
        ...     loss_fn(model(x), y).backward()
    """
    layers = _tracking(model)
    # InstanceNorm writes to its statistics whether it tracks or not.
    instance_norms = (m for m in model.modules() if isinstance(m, _InstanceNorm))
    written = [(buffer, buffer.clone()) for layer in instance_norms for buffer in layer.buffers()]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
        for buffer, values in written:
            buffer.copy_(values)


@torch.no_grad()
def update_bn(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> None:
    """Measure the running statistics anew: their mean over the batches, at the weights as they are.

    Args:
        model: its BatchNorm statistics are replaced; modes and momenta are left as they were. So are the statistics of
            layers that measure nothing: those that no pass calls, or that the model's own `train()` keeps in eval mode.
        batches: an iterable of batches, gone through once.
        forward: `forward(model, batch)` runs the model; by default it is called with the batch's first tensor, on the
            device of the model. Any batch layout works with a function of your own.

    Examples:
        >>> update_bn(model, loader, forward=lambda model, batch: model(batch["image"].cuda()))
    """
    if not isinstance(model, nn.Module):
        swapped = ", then the batches: torch's own update_bn takes them the other way round"
        order = swapped if isinstance(batches, nn.Module) else ""
        raise TypeError(f"model is a {type(model).__name__}: give the torch.nn.Module first{order}")
    layers = _tracking(model)
    if not layers:
        return
    forward = _call_with_first_tensor if forward is None else forward
    momenta = [layer.momentum for layer in layers]
    modes = {module: module.training for module in model.modules()}
    before = [[buffer.clone() for buffer in layer.buffers()] for layer in layers]
    seen = 0
    try:
        model.train()
        for layer in layers:
            if layer.training:
                layer.reset_running_stats()
                layer.momentum = None  # the plain mean over all batches
        for batch in batches:
            forward(model, batch)
            seen += 1
        if not seen:
            raise ValueError("batches is empty, or an iterator that was gone through already: the statistics stay")
        for layer, buffers in zip(layers, before):
            if not _has_measured(layer):
                _put_back(layer, buffers)
    except BaseException:
        for layer, buffers in zip(layers, before):
            _put_back(layer, buffers)
        raise
    finally:
        for layer, momentum in zip(layers, momenta):
            layer.momentum = momentum
        for module, mode in modes.items():
            module.training = mode


def _has_measured(layer: _BatchNorm) -> bool:
    """Since its statistics were reset. Some subclasses write a mean without counting batches."""
    return any(buffer is not None and bool(buffer.any()) for buffer in (layer.num_batches_tracked, layer.running_mean))


def _put_back(layer: nn.Module, values: Iterable[Tensor]) -> None:
    for buffer, before in zip(layer.buffers(), values):
        buffer.copy_(before)


def _call_with_first_tensor(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        raise ValueError(
            f"a batch is a {type(batch).__name__}: say how the model is called, as by "
            'forward=lambda model, batch: model(batch["image"])'
        )
    x = batch if isinstance(batch, Tensor) else batch[0]
    # Without a parameter, as where all norms are affine=False, the running statistics say where the model is.
    return model(x.to(next(itertools.chain(model.parameters(), model.buffers())).device))
