"""How the elements of all parameters are cut into blocks, each with a generator of its own, and scaled by filters.

All perturbed parameters, in the model's order, are cut into blocks; small tensors share one, large ones are cut along
dimension 0. Boundaries follow from shapes alone, so that a shard draws only the blocks it touches, and gets exactly the
numbers of the unsharded tensor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smoothout import filters, sharding
from smoothout.filters import FilterLayout


def block_elements(device: torch.device) -> int:
    """Elements filled at once: on a CPU they and their weights stay in a cache, elsewhere few kernels matter more."""
    return 2**19 if device.type == "cpu" else 2**24


@dataclass(frozen=True)
class Piece:
    """Rows of one parameter inside a block: where their noise lies, and which weights on this rank take it."""

    parameter: int  # its index
    layout: FilterLayout
    offset: int  # of the rows' first element in the block
    shape: tuple[int, ...]  # of the rows, unsharded
    window: tuple[slice, ...]  # the part of the rows that is on this rank
    first_row: int  # of that part, in the whole parameter
    local_row: int  # of that part, in the local tensor
    weights: Tensor  # that part: a view of the local tensor
    whole_rows: int
    filter_groups: tuple[Any, ...]  # process groups over which a filter's squared norm adds up

    def noise_in(self, raw: Tensor) -> Tensor:
        """The noise of the weights: a view of the block's, which is flat."""
        return raw[self.offset : self.offset + math.prod(self.shape)].view(self.shape)[self.window]

    def rows_of(self, local: Tensor) -> Tensor:
        """The same rows of another tensor that has the local one's shape."""
        return local.narrow(0, self.local_row, len(self.weights)) if self.weights.ndim else local


@dataclass(frozen=True)
class Block:
    index: int
    elements: int
    replica: int
    device: torch.device
    pieces: list[Piece]

    def clean_rows(self, θ: list[Tensor]) -> Iterator[Tensor]:
        """The rows of the pieces' noise that must be zero."""
        for piece, values in zip(self.pieces, θ):
            if piece.layout.clean_row is not None and 0 <= piece.layout.clean_row - piece.first_row < len(values):
                yield values[piece.layout.clean_row - piece.first_row]


def overlap(tensors: Iterable[Tensor]) -> bool:
    """Whether some share memory, as after `nn.Parameter(other.data)`, judged by the stretches that they span.

    They must all be backed up before the first takes noise, or a backup has noise in it.
    """
    ends: dict[torch.device, int] = {}
    for tensor in sorted((t for t in tensors if t.numel()), key=Tensor.data_ptr):
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        if tensor.data_ptr() < ends.get(tensor.device, 0):
            return True
        ends[tensor.device] = tensor.data_ptr() + span * tensor.element_size()
    return False


def cut_into_blocks(
    parameters: list[Tensor],
    shards: list[sharding.Shard],
    layouts: list[FilterLayout],
    replicas: list[int],
    may_share: bool,
) -> list[Block]:
    """The blocks that this rank must draw, with the pieces in them.

    Args:
        replicas: of each parameter, see `sharding.replicas`.
        may_share: several small parameters may lie in one block.
    """
    blocks = []
    for index, runs in enumerate(_boundaries(parameters, layouts, may_share)):
        by_replica: dict[int, list[Piece]] = defaultdict(list)
        offset = 0
        for i, first, rows in runs:
            shape = (rows, *parameters[i].shape[1:]) if parameters[i].ndim else ()
            piece = _piece(i, first, shape, offset, parameters[i], shards[i], layouts[i])
            if piece is not None:
                by_replica[replicas[i]].append(piece)
            offset += math.prod(shape)
        for replica, pieces in by_replica.items():
            blocks.append(Block(index, offset, replica, pieces[0].weights.device, pieces))
    return blocks


def _boundaries(
    parameters: list[Tensor], layouts: list[FilterLayout], may_share: bool
) -> Iterator[list[tuple[int, int, int]]]:
    """Runs of (parameter, first row, rows) that share a block, from shapes alone."""
    run: list[tuple[int, int, int]] = []
    filled, device = 0, None
    for i, (p, layout) in enumerate(zip(parameters, layouts)):
        size, rows, limit = p.numel(), p.shape[0] if p.ndim else 1, block_elements(p.device)
        if run and (filled + size > limit or p.device != device or not may_share):
            yield run
            run, filled = [], 0
        device = p.device
        if size > limit and layout.axis != 1 and may_share:
            rows_in_block = max(1, limit // (size // rows))
            for first in range(0, rows, rows_in_block):
                yield [(i, first, min(rows_in_block, rows - first))]
        else:
            run.append((i, 0, rows))
            filled += size
    if run:
        yield run


def _piece(
    index: int,
    first: int,
    shape: tuple[int, ...],
    offset: int,
    parameter: Tensor,
    shard: sharding.Shard,
    layout: FilterLayout,
) -> Piece | None:
    """The part of rows [first, first + shape[0]) that this rank holds; None if it is empty and nobody waits for it."""
    groups = sharding.groups_that_share_filters(parameter, layout)
    if not shape:
        return Piece(index, layout, offset, shape, (), 0, 0, shard.local, 1, groups)
    start, end = shard.start[0], shard.start[0] + shard.local.shape[0]
    low, high = max(first, start), max(first, start, min(first + shape[0], end))
    if low == high and not groups:
        return None
    inner = (slice(s, s + n) for s, n in zip(shard.start[1:], shard.local.shape[1:]))
    window = (slice(low - first, high - first), *inner)
    local_row = low - start if low < high else 0
    weights = shard.local.narrow(0, local_row, high - low)
    return Piece(index, layout, offset, shape, window, low, local_row, weights, parameter.shape[0], groups)


def _norms(piece: Piece, values: Tensor) -> Tensor:
    """Filter norms of a piece, broadcastable to it; squared norms are added up over the ranks that share a filter."""
    dtype = filters.precision(piece.weights)
    if not piece.filter_groups:
        return filters.filter_norms(values, piece.layout, dtype)
    squares = filters.squared_sums(values, piece.layout, dtype, piece.first_row, piece.whole_rows)
    for group in piece.filter_groups:
        torch.distributed.all_reduce(squares, group=group)
    return filters.spread(squares.sqrt(), values, piece.layout, piece.first_row, piece.whole_rows)


def filter_factors(pieces: list[Piece], θ: list[Tensor], strength: float, epsilon: float) -> list[Tensor]:
    """a·‖wᵢ‖/‖θᵢ‖ for every filter of every piece, shaped to broadcast against it."""
    norms_w = [_norms(piece, piece.weights) for piece in pieces]
    norms_θ = [_norms(piece, values) for piece, values in zip(pieces, θ)]
    if epsilon:
        norms_θ = torch._foreach_add(norms_θ, epsilon)
    torch._foreach_mul_(norms_w, strength)
    torch._foreach_clamp_min_(norms_θ, filters.SMALLEST_NORM)
    torch._foreach_div_(norms_w, norms_θ)
    return norms_w
