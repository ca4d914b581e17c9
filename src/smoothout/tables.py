"""What the fused kernels read from device memory: where every tensor lies, and which program does which part of it.

It imports Triton, as `fused` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from smoothout import kernels
from smoothout.filters import FilterLayout


@dataclass(frozen=True)
class Launch:
    """How the kernels are launched: speed alone depends on it (`benchmarks/tune_kernels.py`), not the raw noise.

    Args:
        tile: elements that a program does, a power of two from 1024 on.
        warps: of a program.
    """

    tile: int = 2048
    warps: int = 4


# Ways that all small models compile alike, so that they share a kernel.
_ELEMENT_WAYS = kernels.VECTOR.value | kernels.ANY.value
_FILTER_WAYS = _ELEMENT_WAYS | kernels.ANY_32.value | kernels.TWICE_32.value | kernels.TWICE_128.value
_SMALL_MODEL = 2**20  # elements; a larger one is worth a kernel that has what it needs and no more


@dataclass(frozen=True)
class Part:
    """This rank's rows of one parameter."""

    weights: Tensor
    backup: Tensor  # with the strides of the weights
    layout: FilterLayout
    number: int  # of the parameter
    replica: int
    first_row: int

    @property
    def row_size(self) -> int:
        return math.prod(self.weights.shape[1:])

    @property
    def first(self) -> int:
        """Index of the first element here in the whole parameter."""
        return self.first_row * self.row_size


@dataclass(frozen=True)
class Group:
    """The parts of one dtype, as the kernels see them."""

    dtype: torch.dtype
    parts: list[int]
    table: Tensor
    backups: Tensor
    items: Tensor
    programs: int
    restore_items: Tensor
    restore_programs: int
    has_clean: bool
    ways: int  # a bit for each that the items take


def describe_group(parts: Sequence[Part], dtype: torch.dtype, by_filter: bool, launch: Launch, more_ways: int) -> Group:
    """The parts of one dtype.

    Args:
        by_filter: noise is scaled by filters.
        more_ways: that the kernel shall have, beside those that the parts take.
    """
    numbers = [i for i, part in enumerate(parts) if part.weights.dtype == dtype]
    parts = [parts[i] for i in numbers]
    tile, device = launch.tile, parts[0].weights.device
    rows, items, restore_items = [], [], []
    for i, part in enumerate(parts):
        whole_filters = by_filter and part.layout.axis != "element"
        rows.append(_describe(part, whole_filters))
        if whole_filters:
            count, size = rows[-1][kernels.FILTERS.value], rows[-1][kernels.FILTER_SIZE.value]
            items.append(_filter_items(i, part, count, size, tile))
        else:
            at_once = (tile // 4 if by_filter else tile) if in_order(part) else 0
            items.append(_element_items(i, part, at_once, tile))
        restore_items.append(_element_items(i, part, tile if _dense(part) else 0, tile))
    all_items = np.concatenate(items)
    ways = more_ways | int(np.bitwise_or.reduce(all_items[:, 2]))
    if sum(part.weights.numel() for part in parts) < _SMALL_MODEL:
        ways |= _FILTER_WAYS if by_filter else _ELEMENT_WAYS
    return Group(
        dtype,
        numbers,
        table=on(device, np.array(rows, dtype=np.int64)),
        backups=on(device, np.array([part.backup.data_ptr() for part in parts], dtype=np.int64)),
        items=on(device, all_items),
        programs=len(all_items),
        restore_items=on(device, np.concatenate(restore_items)),
        restore_programs=sum(map(len, restore_items)),
        has_clean=any(part.layout.clean_row is not None for part in parts),
        ways=ways,
    )


def _element_items(number: int, part: Part, at_once: int, tile: int) -> np.ndarray:
    """With `at_once` elements in a "vector" program, or 0 for "any"."""
    way = (at_once, kernels.VECTOR) if at_once else (tile // 8, kernels.ANY)
    return _items(number, part.weights.numel(), *way)


def _filter_items(number: int, part: Part, count: int, size: int, tile: int) -> np.ndarray:
    if part.layout.axis == 0 and in_order(part) and size % 4 == 0:
        if size < 128:
            return _items(number, count, tile // 128, kernels.TWICE_32)
        if size < 1024:
            return _items(number, count, tile // 512, kernels.TWICE_128)
        return _items(number, count, 1, kernels.TWICE_LARGE)
    # Neighbours along axis 1 belong to different filters: many of these at once use whole cache lines.
    many = size <= 128 or part.layout.axis == 1
    return _items(number, count, *(tile // 256, kernels.ANY_32) if many else (1, kernels.ANY_LARGE))


def _describe(part: Part, whole_filters: bool) -> list[int]:
    """A row of the table."""
    shape, elements, row_size = part.weights.shape, part.weights.numel(), part.row_size
    if not whole_filters:
        geometry = [1, elements, 1, 0, 0, max(elements, 1), 0]
    elif part.layout.axis == 0:
        geometry = [shape[0], row_size, max(shape[0], 1), 0, row_size, max(row_size, 1), 0]
    else:
        outputs, inner, rows_in_group = shape[1], math.prod(shape[2:]), shape[0] // part.layout.groups
        geometry = [outputs * part.layout.groups, rows_in_group * inner, max(outputs, 1)]
        geometry += [rows_in_group * outputs * inner, inner, max(inner, 1), outputs * inner]
    first = part.first
    clean = 0 if part.layout.clean_row is None else part.layout.clean_row * row_size - first
    clean_size = 0 if part.layout.clean_row is None else row_size
    dimensions = merged_dimensions(part.weights) or []
    sizes, strides = zip(*[(1, 0)] * (4 - len(dimensions)), *dimensions)
    address = part.weights.data_ptr()
    return [
        address, part.number, part.replica, first, clean, clean + clean_size, elements, *geometry, *sizes[1:], *strides,
        int(_rows_without_gaps(part.weights)),
    ]  # fmt: skip


def _items(number: int, count: int, at_once: int, way: tl.constexpr) -> np.ndarray:
    """One (tensor, tile, way) for each program."""
    tiles = -(-count // at_once)
    items = np.empty((tiles, 3), dtype=np.int32)
    items[:, 0], items[:, 1], items[:, 2] = number, np.arange(tiles), way.value
    return items


def merged_dimensions(tensor: Tensor) -> list[tuple[int, int]] | None:
    """(size, stride) of at most four dimensions that reach the elements in C order; None if it takes more."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape, tensor.stride()):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged if len(merged) <= 4 and all(stride > 0 or size == 0 for size, stride in merged) else None


def _without_gaps(dimensions: Sequence[tuple[int, int]]) -> bool:
    """Whether (size, stride) in some order fill a stretch of memory."""
    extent = 1
    for size, stride in sorted((d for d in dimensions if d[0] != 1), key=lambda d: d[1]):
        if stride != extent:
            return False
        extent *= size
    return True


def _rows_without_gaps(tensor: Tensor) -> bool:
    """Rows one after another, each without gaps in whatever order: contiguous, or channels-last of some kind."""
    if tensor.ndim == 0 or tensor.numel() == 0:
        return True
    row_size = tensor.numel() // tensor.shape[0]
    in_rows = _without_gaps(list(zip(tensor.shape[1:], tensor.stride()[1:])))
    return in_rows and (tensor.shape[0] == 1 or tensor.stride(0) == row_size)


def _aligned(part: Part) -> bool:
    return part.weights.data_ptr() % 16 == 0 and part.backup.data_ptr() % 16 == 0 and part.weights.numel() % 4 == 0


def in_order(part: Part) -> bool:
    """The noise's index counts as memory does, and is cut at multiples of four."""
    return _aligned(part) and _rows_without_gaps(part.weights) and part.first % 4 == 0


def _dense(part: Part) -> bool:
    """Without gaps, in whatever order: good enough to copy."""
    return _aligned(part) and _without_gaps(list(zip(part.weights.shape, part.weights.stride())))


def pinned(values: np.ndarray, device: torch.device) -> Tensor:
    """For an asynchronous copy: torch keeps freed pinned memory until the copies from it are done."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def on(device: torch.device, values: np.ndarray) -> Tensor:
    return pinned(values, device).to(device, non_blocking=True)
