"""A whole update as one CUDA graph: data, all ghost batches side by side with a draw each, clipping, the optimizer.

The host then only says "again", once a step. The same code runs without a graph, which is how a graph is rehearsed and
how it is tested on a CPU.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from smoothout.lab.data import Batches
from smoothout.lab.data.dataset import Split
from smoothout.lab.methods import Method, Plain, Smoothed
from smoothout.lab.models import ghost_sizes
from smoothout.lab.train.capture import captured, watched
from smoothout.lab.train.ghost_step import Batch, GhostStep
from smoothout.lab.train.lanes import (
    Flat,
    Lane,
    Share,
    SideStream,
    Weights,
    flat_size,
    running_norms,
    running_statistics,
)
from smoothout.lab.train.stacked import StackedLane, why_not_stacked

if TYPE_CHECKING:
    from smoothout.perturb import Perturbation

LANES = 8
# All ghosts in one launch a layer, where that can be: 1.65 times as fast as 8 streams (benchmarks/epoch_time.py).
# None: on CUDA in half precision; in fp32 cuDNN is faster.
STACKED: bool | None = None
# Passes for all ghosts together, and streams that they take in turn: while one pass waits for memory, the other
# computes. One pass takes 1.04 times as long, four on two streams 1.10 times, eight on four 1.13 times.
STACKS, STACK_STREAMS = 2, 2
REHEARSALS = 2  # before a capture: one for what is done lazily, one that is watched for waits on the device


class Sums(NamedTuple):
    """Where an epoch's steps leave what they saw: the loss of every step, the right answers of all."""

    losses: Tensor
    correct: Tensor


class Steps(Protocol):
    """The updates of an epoch, one by one."""

    def begin(self, epoch: int, first: int) -> None:
        """Get ready for the steps of an epoch from `first` on."""
        ...

    def step(self, step: int) -> float:
        """Do the next update; gives the passes of back-propagation over the batch that it took."""
        ...


class OneByOne:
    """Batches from a loader, and the method's own step: works for every method, on every device."""

    def __init__(self, method: Method, batches: Batches, sums: Sums) -> None:
        self._method, self._batches, self._sums = method, batches, sums
        self._iterator = iter(())

    def begin(self, epoch: int, first: int) -> None:
        self._iterator = self._batches.epoch(epoch, first)

    def step(self, step: int) -> float:
        images, labels = next(self._iterator)
        result = self._method.step(Batch(images, labels, self._batches.size_of(step)))
        self._sums.losses[step].copy_(result.loss)
        self._sums.correct.add_(result.correct)
        return result.evaluations


class Pass(NamedTuple):
    """A ghost batch, the draw at which it is seen (the sign 0: at clean weights), and its weight in the gradient."""

    ghost: int
    draw: int
    sign: float = 1.0
    weight: float = 1.0


def passes_of(method: Plain, ghosts: int) -> list[Pass]:
    """The passes of one update, as the method's own step makes them."""
    if not isinstance(method, Smoothed) or method.draws == 1:
        return [Pass(ghost, 0) for ghost in range(ghosts)]
    draws = ghosts if method.draws is None else method.draws
    pairs = method.antithetic and draws % 2 == 0
    which = [(i // 2, -1.0 if i % 2 else 1.0) if pairs else (i, 1.0) for i in range(draws)]
    if method.draws is None:
        noisy, together = method.noisy_ghosts(ghosts), method.ghosts_per_draw
        draw_of = [which[ghost // together] if ghost < noisy else (0, 0.0) for ghost in range(ghosts)]
        return [Pass(ghost, *draw) for ghost, draw in enumerate(draw_of)]
    return [Pass(ghost, draw, sign, 1 / draws) for draw, sign in which for ghost in range(ghosts)]


def why_not(method: Method, update: GhostStep, batches: Batches, is_compiled: bool) -> str:
    """In words, why whole updates cannot be captured here; empty if they can."""
    if not isinstance(method, Plain) or type(method) not in (Plain, Smoothed):
        return "its method takes its steps itself"
    if not isinstance(batches.split, Split):
        return "its images are read from files"
    if update.processes.world_size > 1 or update.scaler.is_enabled() or is_compiled:
        return "it has several processes, a gradient scaler or a compiled network"
    if isinstance(method, Smoothed) and not _draws_by_kernels(method):
        return "its noise is not drawn by the fused kernels"
    if _several_stay(method) and stackable(method, update, batches) != _sizes(batches):
        return "several draws a step stay in the weights, and not all ghosts are seen in one pass"
    if not all(torch._debug_has_internal_overlap(p) == 0 and _is_dense(p) for p in update.parameters):
        return "a weight has gaps in memory"
    several = len(passes_of(method, update.chunks)) > 1
    if several:
        norms = running_norms(update.model)
        known = {id(b) for norm in norms for b in norm.buffers()}
        if any(id(b) not in known for b in update.model.buffers()) or len({norm.momentum for norm in norms}) > 1:
            return "its buffers are not those of BatchNorm with one momentum"
        if any(norm.momentum is None for norm in norms):
            return "its BatchNorm has no momentum"
    return _why_not_by_a_pass(update, batches, several)


def _why_not_by_a_pass(update: GhostStep, batches: Batches, several: bool) -> str:
    """What only a pass shows, here of a copy: layers and weights that are not used as they are counted on.

    Args:
        several: passes an update; else the network's own running statistics move, as often as they may.
    """
    model, device = copy.deepcopy(update.model).train(), batches.device
    norms, calls = running_norms(model), []
    for norm in norms:
        norm.register_forward_hook(lambda layer, *_: calls.append(layer))
    order, uniforms = batches.numbers(0)
    size = ghost_sizes(batches.batch_size, update.chunks)[0]
    images, _ = batches.gathered(order[:size].to(device), uniforms.to(device))
    with torch.random.fork_rng([device] if device.type == "cuda" else []), update.precision():
        outputs = model(images)
    trained = [p for p in model.parameters() if p.requires_grad]
    if any(gradient is None for gradient in torch.autograd.grad(outputs.sum(), trained, allow_unused=True)):
        return "a weight has no gradient"
    if several and sorted(map(id, calls)) != sorted(map(id, norms)):
        return "a pass does not see each BatchNorm once"
    return ""


def stackable(method: Method, update: GhostStep, batches: Batches) -> set[int]:
    """Sizes of batches whose ghosts can all be seen in one pass; those of a last batch may differ in size."""
    wanted = batches.device.type == "cuda" and update.half is not None if STACKED is None else STACKED
    if not wanted or update.chunks == 1:
        return set()
    draws = method.draws if isinstance(method, Smoothed) else 1
    cut = {size: ghost_sizes(size, update.chunks) for size in _sizes(batches)}
    return {size for size, ghosts in cut.items() if not why_not_stacked(update.model, draws, update.chunks, ghosts)}


def _sizes(batches: Batches) -> set[int]:
    return {batches.size_of(step) for step in range(len(batches))}


def _several_stay(method: Method) -> bool:
    """Whether noise stays in the weights, and a ghost's comes on top of that of the ghost before."""
    return isinstance(method, Smoothed) and not method.smooth.denoise and method.draws != 1


def _draws_by_kernels(method: Smoothed) -> bool:
    perturbation = method.smooth.perturbation
    return perturbation.generator_kind == "fused" or perturbation.local_weights[0].device.type != "cuda"


def _is_dense(parameter: Tensor) -> bool:
    span = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride()))
    return span == parameter.numel()


class WholeStep:
    """Updates of Plain and Smoothed. `why_not` says where it cannot be.

    Args:
        capture: into a CUDA graph, once a batch of its size was seen often enough.
    """

    def __init__(self, method: Plain, update: GhostStep, batches: Batches, sums: Sums, *, capture: bool) -> None:
        self._method, self._update, self._batches, self._sums = method, update, batches, sums
        self._smooth = method.smooth if isinstance(method, Smoothed) else None
        self._stays = self._smooth is not None and not self._smooth.denoise  # the noise, in the network's own weights
        self._several_stay = _several_stay(method)
        self._may_capture = capture
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._calls: dict[int, int] = {}
        self._position: tuple[float, int] | None = None  # strength and step that the device has
        device = batches.device
        self._order = torch.zeros(len(batches.split), dtype=torch.int64, device=device)
        self._uniforms = torch.zeros(len(batches.split), batches.augment.draws, device=device)
        self._within = torch.arange(batches.batch_size, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)  # the step of the epoch
        self._make_lanes()

    def _make_lanes(self) -> None:
        trained, model = self._update.parameters, self._update.model
        has_copies = self._smooth is not None and (not self._stays or self._several_stay)
        noisy = [s.parameter for s in self._smooth.perturbation.selected] if self._smooth and has_copies else []
        self._weights = Weights(model, noisy, self._update.half)
        each = passes_of(self._method, self._update.chunks)
        passes = len(each)
        self._stackable = stackable(self._method, self._update, self._batches)
        in_lanes = 0 if self._stackable == _sizes(self._batches) else min(LANES, passes)
        count = max(in_lanes, passes if self._stackable else 0)
        self._norms = running_norms(model) if passes > 1 else []
        self._momentum = next((norm.momentum for norm in self._norms), None) or 0.0
        running = running_statistics(self._norms)
        device = trained[0].device
        self._gradients = torch.zeros(count, flat_size(trained), device=device)
        self._statistics = torch.zeros(count, flat_size(running), device=device) if running else None
        self._gradient = Flat(trained, torch.float32)
        self._statistic = Flat(running, torch.float32) if running else None
        self._stacks: list[StackedLane] = []
        if self._stackable:
            assert self._statistics is not None
            draws = [(one.draw, one.sign) for one in each]
            memory = (self._gradients, self._statistics)
            together = passes // STACKS if passes % STACKS == 0 else passes
            self._stacks = [
                StackedLane(self._weights, trained, draws, slice(first, first + together), *memory, self._momentum)
                for first in range(0, passes, together)
            ]
        streams = self._stacks[:STACK_STREAMS]
        self._streams = [SideStream(device) for _ in streams] if len(streams) > 1 else []
        kept = [None] * count if self._statistics is None else list(self._statistics)
        memories = list(zip(self._gradients, kept))[:in_lanes]
        self._lanes = [Lane(self._weights, trained, *memory) for memory in memories]

    # ---- an epoch ----------------------------------------------------------------------------------------------------

    def begin(self, epoch: int, first: int) -> None:
        order, uniforms = self._batches.numbers(epoch)
        self._order.copy_(order)
        self._uniforms.copy_(uniforms)
        self._at.fill_(first)

    def step(self, step: int) -> float:
        size = self._batches.size_of(step)
        self._set_position()
        if size in self._graphs:
            self._graphs[size].replay()
        else:
            self._first_times(size)
        if self._smooth is not None:
            self._smooth.count_step()
        return (self._method.draws or 1) if isinstance(self._method, Smoothed) else 1

    def _set_position(self) -> None:
        """Tell the device strength and step, unless it has them: a graph counts its steps itself."""
        if self._smooth is None:
            return
        position = (self._smooth.current_strength, self._smooth.step_count)
        if position != self._position:
            self._smooth.perturbation.set_position(*position)
        self._position = (position[0], position[1] + 1)

    # ---- capture -----------------------------------------------------------------------------------------------------

    def _first_times(self, size: int) -> None:
        calls = self._calls[size] = self._calls.get(size, 0) + 1
        if not self._may_capture or calls < REHEARSALS:
            self._do(size)
        elif calls == REHEARSALS:
            _, self._may_capture = watched(lambda: self._do(size))
        else:
            self._graphs[size] = self._captured(size)
            self._graphs[size].replay()

    def _captured(self, size: int) -> torch.cuda.CUDAGraph:
        groups = [group for group in self._update.optimizer.param_groups if "capturable" in group]
        before = [group["capturable"] for group in groups]
        graph = torch.cuda.CUDAGraph()
        try:
            for group in groups:
                group["capturable"] = True  # it is, with the fused kernels: this only says that it is meant
            with captured(graph):
                self._do(size)
        finally:
            for group, value in zip(groups, before):
                group["capturable"] = value
        return graph

    # ---- one update --------------------------------------------------------------------------------------------------

    def _do(self, size: int) -> None:
        """Everything of one update; only operations on the device, of tensors that stay where they are."""
        if self._smooth is not None and self._stays:
            self._draw_and_leave(self._smooth.perturbation)
        self._weights.refresh()
        if size in self._stackable:
            self._draw_for_stacks()  # before the images are gathered: a GPU does both at once
        rows = self._order.index_select(0, self._within[:size] + self._at * self._batches.batch_size)
        images, labels = self._batches.gathered(rows, self._uniforms)
        sizes = ghost_sizes(size, self._update.chunks) if self._update.chunks > 1 else [size]
        passes = passes_of(self._method, len(sizes))
        if size in self._stackable:
            self._by_stacks(images, labels)
            self._add_up(len(passes), [stack.seen for stack in self._stacks], len(passes))
        else:
            busy = self._lanes[: len(passes)]
            self._side_by_side(busy, passes, list(zip(images.split(sizes), labels.split(sizes))), size)
            self._add_up(len(busy), [lane.seen for lane in busy], len(passes))
        self._update.optimizer.step()
        self._at.add_(1)
        if self._smooth is not None:
            self._smooth.perturbation.advance()

    def _draw_and_leave(self, perturbation: Perturbation) -> None:
        """Into the network's own weights, each draw on top of those before."""
        own = [w.detach() for w in perturbation.local_weights]
        if not self._several_stay:
            perturbation.draw_into(own)
            return
        for stack in self._stacks:
            stack.draw(perturbation, left_in=own)

    def _draw_for_stacks(self) -> None:
        if self._smooth is None or self._stays:
            return
        for i, stack in enumerate(self._stacks):
            with self._turn(i):
                stack.draw(self._smooth.perturbation)

    def _by_stacks(self, images: Tensor, labels: Tensor) -> None:
        count = len(self._stacks)
        for i, (stack, own, right) in enumerate(zip(self._stacks, images.chunk(count), labels.chunk(count))):
            with self._turn(i):
                stack.go(own, right, self._update.precision())
        for stream in self._streams:
            stream.join()

    def _turn(self, stack: int) -> AbstractContextManager[object]:
        return self._streams[stack % len(self._streams)].turn() if self._streams else nullcontext()

    def _side_by_side(
        self, busy: list[Lane], passes: list[Pass], ghosts: list[tuple[Tensor, Tensor]], size: int
    ) -> None:
        for number, lane in enumerate(busy):
            mine = range(len(passes) * number // len(busy), len(passes) * (number + 1) // len(busy))
            with lane.stream.turn():
                self._passes(lane, mine, passes, ghosts, size)
        for lane in busy:
            lane.stream.join()

    def _passes(
        self, lane: Lane, mine: range, passes: list[Pass], ghosts: list[tuple[Tensor, Tensor]], size: int
    ) -> None:
        last = None
        momentum = self._momentum
        for j in mine:
            each = passes[j]
            images, labels = ghosts[each.ghost]
            if self._smooth is not None and not self._stays and (each.draw, each.sign) != last:
                self._smooth.perturbation.draw_into(lane.drawn.destinations, each.draw, each.sign)
                lane.drawn.finish()
                last = (each.draw, each.sign)
            later = len(passes) - 1 - j  # passes whose statistics come on top of this one's
            share = Share(each.weight * len(labels) / size, each.weight, statistics=momentum * (1 - momentum) ** later)
            lane.go(images, labels, share, self._update.precision(), first=j == mine.start)

    @torch.no_grad()
    def _add_up(self, sums: int, seen: list[Tensor], passes: int) -> None:
        """Gradient and running statistics of as many sums, and what was seen; the gradient is clipped."""
        torch.sum(self._gradients[:sums], 0, out=self._gradient.all)
        if self._update.clip:
            norm = torch.linalg.vector_norm(self._gradient.all)
            self._gradient.all.mul_(torch.clamp(self._update.clip / (norm + 1e-6), max=1.0))
        for parameter, gradient in zip(self._update.parameters, self._gradient.views):
            parameter.grad = gradient
        if self._statistic is not None and self._statistics is not None:
            torch.sum(self._statistics[:sums], 0, out=self._statistic.all)
            running = running_statistics(self._norms)
            torch._foreach_mul_(running, (1 - self._momentum) ** passes)
            torch._foreach_add_(running, self._statistic.views)
            tracked = [norm.num_batches_tracked for norm in self._norms if norm.num_batches_tracked is not None]
            torch._foreach_add_(tracked, passes)
        loss, correct = torch.stack(seen).sum(0)
        self._sums.losses.index_copy_(0, self._at, loss[None])
        self._sums.correct.add_(correct)
