"""Copies of a network that make passes side by side, each at noisy weights of its own.

A pass at a copy needs no restore: the network's own weights are only read. Copies run on streams of their own, so that
the small kernels of several ghost batches fill a GPU together.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

ALIGNMENT = 8  # elements: 16 bytes of the smallest dtype, as vector loads need
# Autocast makes copies of the weights of these in its own precision, pass by pass; a lane has them in it already.
CAST_BY_AUTOCAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Flat:
    """One stretch of memory, seen as tensors with the shapes and strides of others: one kernel adds all of them."""

    def __init__(self, like: Sequence[Tensor], dtype: torch.dtype, memory: Tensor | None = None) -> None:
        self.all = torch.zeros(flat_size(like), dtype=dtype, device=like[0].device) if memory is None else memory
        self.views: list[Tensor] = []
        first = 0
        for tensor in like:
            self.views.append(
                torch.as_strided(self.all, tensor.shape, tensor.stride(), self.all.storage_offset() + first)
            )
            first += _padded(tensor)


def flat_size(like: Sequence[Tensor]) -> int:
    """Elements that a Flat of these takes."""
    return sum(map(_padded, like))


def _padded(tensor: Tensor) -> int:
    return -(-tensor.numel() // ALIGNMENT) * ALIGNMENT


def running_norms(model: nn.Module) -> list[_BatchNorm]:
    """The layers of plain BatchNorm whose running statistics move with every pass."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return [m for m in model.modules() if isinstance(m, kinds) and type(m) in kinds and m.running_mean is not None]


def running_statistics(norms: Sequence[_BatchNorm]) -> list[Tensor]:
    """Mean and variance of each."""
    return [statistic for norm in norms for statistic in (norm.running_mean, norm.running_var) if statistic is not None]


@dataclass(frozen=True)
class Share:
    """What one pass counts for: its part of the batch's mean loss, of the right answers, and of running statistics."""

    loss: float
    correct: float
    statistics: float


class Weights:
    """Where a network's copies find their weights: the network's own, or those in the precision of autocast.

    Args:
        noisy: the parameters of which every copy has its own.
        half: the precision of autocast; None: there is none.
    """

    def __init__(self, model: nn.Module, noisy: Sequence[Tensor], half: torch.dtype | None) -> None:
        self.model, self.noisy = model, list(noisy)
        cast_ids = _ids_cast_by_autocast(model) if half is not None else set()
        is_noisy = {id(p) for p in noisy}
        self._half = half
        self._cast_ids = cast_ids
        self._to_cast = [p for p in model.parameters() if id(p) in cast_ids - is_noisy]
        self._casts = [torch.empty_like(p, dtype=half, requires_grad=False) for p in self._to_cast]

    def refresh(self) -> None:
        """After an update: the casts follow the weights."""
        if self._to_cast:
            torch._foreach_copy_(self._casts, [p.detach() for p in self._to_cast])

    def for_one_copy(self) -> tuple[dict[int, nn.Parameter], Drawn]:
        """By the id of a parameter what stands in its place, and what takes its noise."""
        own = [_empty(p, dtype) for p, dtype in zip(self.noisy, self._wanted())]
        return self._leaves(own), self._drawn(own, self._unrounded())

    def for_ghosts(self, ghosts: int, draws: int) -> tuple[dict[int, nn.Parameter], list[Drawn]]:
        """The same for all ghosts of a batch: tensors have a dimension more, and every draw has its place.

        Of one draw, and of what takes no noise, ghosts see the same memory.
        """
        own = [_empty(p, dtype, draws) for p, dtype in zip(self.noisy, self._wanted())]
        unrounded = self._unrounded()  # one draw comes after another
        drawn = [self._drawn([tensor[i] for tensor in own], unrounded) for i in range(draws)]
        return self._leaves([_expanded(tensor, ghosts) for tensor in own], ghosts), drawn

    def _wanted(self) -> list[torch.dtype]:
        return [self._half if self._half and id(p) in self._cast_ids else p.dtype for p in self.noisy]

    def _unrounded(self) -> list[Tensor | None]:
        """One launch draws in one precision: where some are wanted in another, they are rounded after it."""
        wanted = self._wanted()
        mixed = len(set(wanted)) > 1
        return [_empty(p, p.dtype) if mixed and dtype != p.dtype else None for p, dtype in zip(self.noisy, wanted)]

    def _drawn(self, own: list[Tensor], unrounded: list[Tensor | None]) -> Drawn:
        to_round = [(t, d) for t, d in zip(own, unrounded) if d is not None]
        drawn = [t if d is None else d for t, d in zip(own, unrounded)]
        return Drawn(drawn, [t for t, _ in to_round], [d for _, d in to_round])

    def _leaves(self, own: list[Tensor], ghosts: int = 0) -> dict[int, nn.Parameter]:
        shared = {id(p): p.detach() for p in self.model.parameters()}
        shared |= {id(p): cast for p, cast in zip(self._to_cast, self._casts)}
        values = {key: _expanded(t[None], ghosts) for key, t in shared.items()} if ghosts else shared
        values |= {id(p): tensor for p, tensor in zip(self.noisy, own)}
        return {id(p): nn.Parameter(values[id(p)], requires_grad=p.requires_grad) for p in self.model.parameters()}


@dataclass(frozen=True)
class Drawn:
    """Where noisy weights are drawn to, and those of them that are then rounded into others."""

    destinations: list[Tensor]
    rounded: list[Tensor]
    unrounded: list[Tensor]

    def finish(self) -> None:
        """After a draw."""
        if self.rounded:
            torch._foreach_copy_(self.rounded, self.unrounded)


def _empty(parameter: Tensor, dtype: torch.dtype, copies: int = 0) -> Tensor:
    """Memory with a parameter's strides; with `copies`, for so many of it, each as aligned as the first."""
    shape, stride = parameter.shape, parameter.stride()
    if copies:
        shape, stride = (copies, *shape), (_padded(parameter), *stride)
    return torch.empty_strided(shape, stride, dtype=dtype, device=parameter.device)


def _expanded(tensor: Tensor, ghosts: int) -> Tensor:
    return tensor.expand(ghosts, *tensor.shape[1:])


def _ids_cast_by_autocast(model: nn.Module) -> set[int]:
    cast: set[int] = set()
    others: set[int] = set()
    for module in model.modules():
        ids = {id(p) for p in module._parameters.values() if p is not None}
        (cast if type(module) in CAST_BY_AUTOCAST else others).update(ids)
    return cast - others


class SideStream:
    """A stream beside the current one; where there are none, the only one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def turn(self) -> AbstractContextManager[object]:
        """What is begun within runs on it, after everything that was begun on the current one."""
        stack = ExitStack()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            stack.enter_context(torch.cuda.stream(self._stream))
        return stack

    def join(self) -> None:
        """Let the current stream wait for it."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class Lane:
    """One copy: its weights, the sum of its gradients and of what its passes saw.

    Args:
        gradient: fp32 memory for the sum of gradients.
        statistics: memory for the weighted sum of BatchNorm's statistics; None: the network's own move, which is right
            only if there is one pass an update.
    """

    def __init__(
        self, weights: Weights, trained: Sequence[Tensor], gradient: Tensor, statistics: Tensor | None
    ) -> None:
        self.replica = copy.deepcopy(weights.model)
        leaves, self.drawn = weights.for_one_copy()
        for original, module in zip(weights.model.modules(), self.replica.modules()):
            for slot, parameter in original._parameters.items():
                if parameter is not None:
                    module._parameters[slot] = leaves[id(parameter)]
            module._buffers.update(original._buffers)
        self.replica.train()  # as the loop does with the network itself
        self._buffers = [(m, name, b) for m in self.replica.modules() for name, b in m._buffers.items()]
        self._leaves = [leaves[id(p)] for p in trained]
        self._gradient, self._stage = Flat(trained, torch.float32, gradient), Flat(trained, torch.float32)
        self._groups = by_dtype(self._leaves)
        self._statistics_sum = statistics
        self._statistics: Flat | None = None
        if statistics is not None:
            self._keep_own_statistics()
        self.seen = torch.zeros(2, device=trained[0].device)  # loss, right answers
        self.stream = SideStream(trained[0].device)

    def _keep_own_statistics(self) -> None:
        """A pass leaves its batch's statistics, so that passes side by side can be weighed as if one after another."""
        norms = running_norms(self.replica)
        like = running_statistics(norms)
        self._statistics = Flat(like, torch.float32)
        for i, norm in enumerate(norms):
            # `.data`: views share a version counter, and autograd would take one layer's statistics for another's.
            norm.running_mean, norm.running_var = (view.data for view in self._statistics.views[2 * i : 2 * i + 2])
            norm.momentum, norm.num_batches_tracked = 1.0, None

    @torch.no_grad()
    def _keep_buffers_in_place(self) -> None:
        """Where a pass put a new tensor in a buffer's place, the network's own buffer takes its values."""
        for module, name, buffer in self._buffers:
            new = module._buffers[name]
            if new is not buffer and buffer is not None and new is not None:
                buffer.copy_(new)
                module._buffers[name] = buffer

    def go(
        self, images: Tensor, labels: Tensor, share: Share, precision: AbstractContextManager[object], first: bool
    ) -> None:
        """One pass; the sums begin anew with the first."""
        with precision:
            outputs = self.replica(images)
        if self._statistics is None:
            self._keep_buffers_in_place()
        loss = F.cross_entropy(outputs.float(), labels) * share.loss
        gradients = torch.autograd.grad(loss, self._leaves)
        into = self._gradient if first else self._stage
        for numbers in self._groups:
            torch._foreach_copy_([into.views[i] for i in numbers], [gradients[i] for i in numbers])
        with torch.no_grad():
            correct = (outputs.argmax(1) == labels).sum() * share.correct
            seen = torch.stack([loss.detach(), correct.to(loss.dtype)])
            if first:
                self.seen.copy_(seen)
            else:
                self._gradient.all.add_(self._stage.all)
                self.seen.add_(seen)
            if self._statistics is not None and self._statistics_sum is not None:
                if first:
                    torch.mul(self._statistics.all, share.statistics, out=self._statistics_sum)
                else:
                    self._statistics_sum.add_(self._statistics.all, alpha=share.statistics)


def by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Numbers of the tensors of each dtype: one kernel takes one."""
    numbers: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        numbers.setdefault(tensor.dtype, []).append(i)
    return list(numbers.values())
