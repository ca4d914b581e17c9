"""The host's side of the fused kernels: which tensors they can do, the tables in device memory, the launches.

It imports Triton: `perturb` imports it only when there is a CUDA device to use it on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from smoothout import filters, kernels, noise, philox
from smoothout.filters import FilterLayout

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_BITS = {torch.float32: tl.int32, torch.bfloat16: tl.int16, torch.float16: tl.int16}
_LAWS: dict[type, tl.constexpr] = {
    noise.Uniform: philox.UNIFORM,
    noise.Gaussian: philox.GAUSSIAN,
    noise.Rademacher: philox.RADEMACHER,
}
_SCALES: dict[type, tl.constexpr] = {
    filters.Absolute: kernels.ABSOLUTE,
    filters.Weight: kernels.WEIGHT,
    filters.Filter: kernels.FILTER,
}


_CACHE = {"plain": kernels.PLAIN, "evict first": kernels.EVICT_FIRST, "streaming": kernels.STREAMING}


@dataclass(frozen=True)
class Launch:
    """How the kernels are launched: speed alone depends on it (`benchmarks/tune_kernels.py`), not the raw noise.

    Args:
        tile: elements that a program does, a power of two from 1024 on.
        warps: of a program.
        cache: what the backups do there: "plain", "evict first" or "streaming".
        hold: filters that fit into a tile are kept in registers, instead of read and drawn twice.
        registers: of a thread, at most: fewer let more programs run at once.
    """

    tile: int = 2048
    warps: int = 4
    cache: str = "plain"
    hold: bool = False
    registers: int | None = None


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
class _Group:
    """The parts of one dtype, as the kernels see them."""

    dtype: torch.dtype
    parts: list[int]
    table: Tensor
    backups: Tensor
    items: Tensor
    restore_items: Tensor
    has_clean: bool
    ways: int  # a bit for each that the items take


def can_fuse(parts: Sequence[Part], law: noise.Noise) -> bool:
    """Whether the kernels can draw this noise for these tensors; where not, foreach does.

    Not: double precision, more than four dimensions that do not merge, a stride of 0, 2³¹ elements or more (2³⁴ if
    all is in order, and a row has less than 2³¹), more than one device.
    """
    if type(law) not in _LAWS or len({part.weights.device for part in parts}) != 1:
        return False
    return all(
        part.weights.dtype in _DTYPES
        and _merged_dimensions(part.weights) is not None
        and part.row_size < 2**31 - 2**16
        and part.first + part.weights.numel() < (2**34 if _in_order(part) else 2**31 - 2**16)
        for part in parts
    )


def fuse(parts: Sequence[Part], law: noise.Noise, scale: filters.Scale) -> Fused | None:
    """The kernels for these parts, or None: where they cannot do them, or where Triton does not work."""
    if not can_fuse(parts, law):
        return None
    try:
        fused = Fused(parts, law, scale)
        fused.rehearse(law, scale)
    except Exception as error:
        warnings.warn(f"Triton does not work here, so noise takes more and smaller kernels: {error!r}", stacklevel=2)
        return None
    return fused


class Fused:
    """Draws for a fixed list of tensors on one device.

    Args:
        parts: what takes noise.
        law, scale: raw noise and how it is scaled.
        launch: speed.
    """

    def __init__(
        self, parts: Sequence[Part], law: noise.Noise, scale: filters.Scale, launch: Launch | None = None, ways: int = 0
    ) -> None:
        self._parts = list(parts)
        self._launch_options = launch = Launch() if launch is None else launch
        self._tile = launch.tile
        self._device = parts[0].weights.device
        self._law, self._scale = _LAWS[type(law)], _SCALES[type(scale)]
        self._epsilon = scale.epsilon if isinstance(scale, filters.Filter) else 0.0
        dtypes = dict.fromkeys(part.weights.dtype for part in parts)
        self._groups = [self._group(dtype, isinstance(scale, filters.Filter), ways) for dtype in dtypes]
        self._state = torch.zeros(kernels.BACKED_UP.value + len(self._groups), dtype=torch.int64, device=self._device)
        self._destinations: dict[tuple[int, ...], list[Tensor]] = {}
        self._captured_step: int | None = None

    def rehearse(self, law: noise.Noise, scale: filters.Scale) -> None:
        """Compile the kernels and try them on a few weights: a machine may lack what Triton needs."""
        for group in self._groups:
            weights = torch.ones(2, 4, dtype=group.dtype, device=self._device)
            layout = FilterLayout(0, 1, 0 if group.has_clean else None)
            part = Part(weights, torch.zeros_like(weights), layout, 0, 0, 0)
            trial = Fused([part], law, scale, self._launch_options, group.ways)
            trial.set_position(0, 0, 0.5)
            trial.apply()
            noisy = weights.clone()
            trial.restore()
            if not (weights == 1.0).all() or (noisy[1] == 1.0).all():
                raise RuntimeError(f"a draw gave {noisy.tolist()}, a restore {weights.tolist()}")

    # ---- position ----------------------------------------------------------------------------------------------------

    def set_position(self, seed: int, step: int, strength: float, backed_up: bool = False) -> None:
        """What the next launches on this stream draw with; an asynchronous copy.

        In a CUDA graph that is being captured nothing is copied: there every new `step` adds one to the step in device
        memory, so each replay draws the next step's noise, with the strength that was set last.
        """
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if step != self._captured_step:
                self.advance()
            self._captured_step = step
            return
        self._captured_step = None
        strength_bits = int(np.float32(strength).view(np.uint32))
        self._state.copy_(
            _pinned(
                np.array([seed, step, strength_bits, *[int(backed_up)] * len(self._groups)], dtype=np.int64),
                self._device,
            ),
            non_blocking=True,
        )

    def advance(self) -> None:
        """Go on to the next step, in device memory: captured in a CUDA graph, every replay draws other noise."""
        self._state[kernels.STEP.value].add_(1)

    # ---- launches ----------------------------------------------------------------------------------------------------

    def apply(self, draw: int = 0, sign: float = 1.0) -> None:
        """backup ← w, w ← w + θ."""
        self._draw(kernels.APPLY, [group.backups for group in self._groups], draw, sign)

    def add(self, draw: int = 0, sign: float = 1.0) -> None:
        """w ← w + θ; the backups stay."""
        self._draw(kernels.ADD, [group.backups for group in self._groups], draw, sign)

    def draw_into(self, destinations: Sequence[Tensor], draw: int = 0, sign: float = 1.0) -> None:
        """destination ← w + θ, for tensors with the strides of the weights; w stays.

        They may have another dtype (fp32, bf16, fp16) than the weights, the same one for all weights of a dtype: w + θ
        is computed in fp32 and rounded to it once. Streams in parallel may do this for several draws of one position.
        Before it is captured in a CUDA graph it must have run once with these destinations.
        """
        for part, t in zip(self._parts, destinations, strict=True):
            same = t.shape == part.weights.shape and t.stride() == part.weights.stride()
            if not same or t.dtype not in _DTYPES or t.device != self._device or t.data_ptr() % 16:
                raise ValueError(
                    "a destination needs its weight's shape, strides and device, a dtype of 16 or 32 bits, and 16-byte "
                    f"alignment; one for {tuple(part.weights.shape)} is {t.dtype}, {tuple(t.shape)}, with strides "
                    f"{t.stride()}, on {t.device}"
                )
        dtypes = [{destinations[i].dtype for i in group.parts} for group in self._groups]
        if any(len(kinds) > 1 for kinds in dtypes):
            raise ValueError(f"destinations of weights of one dtype have several: {dtypes}")
        addresses = tuple(t.data_ptr() for t in destinations)
        if addresses not in self._destinations:
            self._destinations[addresses] = self._addresses(destinations)
        self._draw(kernels.INTO, self._destinations[addresses], draw, sign, [next(iter(kinds)) for kinds in dtypes])

    def noise(self, draw: int = 0) -> list[Tensor]:
        """θ in fp32, as new tensors."""
        like = [part.weights for part in self._parts]
        result = [torch.empty_strided(w.shape, w.stride(), dtype=torch.float32, device=w.device) for w in like]
        self._draw(kernels.NOISE, self._addresses(result), draw, 1.0, [torch.float32] * len(self._groups))
        return result

    def restore(self) -> None:
        """w ← backup, if `apply` was launched since the position was set."""
        for number, group in enumerate(self._groups):
            operands = (group.restore_items, group.table, group.backups, self._state, number)
            self._launch(kernels.restore_kernel, operands, DTYPE=_BITS[group.dtype])

    def _draw(
        self,
        output: tl.constexpr,
        others: list[Tensor],
        draw: int,
        sign: float,
        dtypes: Sequence[torch.dtype] | None = None,
    ) -> None:
        dtypes = [group.dtype for group in self._groups] if dtypes is None else dtypes
        for number, (group, addresses, dtype) in enumerate(zip(self._groups, others, dtypes)):
            operands = (group.items, group.table, addresses, self._state, number, draw, sign, self._epsilon)
            self._launch(
                kernels.draw_kernel,
                operands,
                DTYPE=_DTYPES[group.dtype],
                OTHER_DTYPE=_DTYPES[dtype],
                LAW=self._law.value,
                SCALE=self._scale.value,
                OUTPUT=output.value,
                HAS_CLEAN=group.has_clean,
                WAYS=group.ways,
                enable_fp_fusion=False,  # w + a·n rounds a·n first, as `noise` and foreach do
            )

    def _launch(self, kernel: Any, operands: tuple[Any, ...], **constants: Any) -> None:
        programs = len(operands[0])
        if programs:
            with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                kernel[(programs,)](
                    *operands,
                    TILE=self._tile,
                    CACHE=_CACHE[self._launch_options.cache].value,
                    num_warps=self._launch_options.warps,
                    maxnreg=self._launch_options.registers,
                    **constants,
                )

    def _addresses(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Per group, the addresses of tensors that stand beside the parts."""
        return [
            _on(self._device, np.array([tensors[i].data_ptr() for i in group.parts], dtype=np.int64))
            for group in self._groups
        ]

    # ---- tables ------------------------------------------------------------------------------------------------------

    def _group(self, dtype: torch.dtype, by_filter: bool, more_ways: int) -> _Group:
        numbers = [i for i, part in enumerate(self._parts) if part.weights.dtype == dtype]
        parts = [self._parts[i] for i in numbers]
        rows, items, restore_items = [], [], []
        for i, part in enumerate(parts):
            whole_filters = by_filter and part.layout.axis != "element"
            rows.append(_describe(part, whole_filters))
            if whole_filters:
                items.append(
                    self._filter_items(i, part, rows[-1][kernels.FILTERS.value], rows[-1][kernels.FILTER_SIZE.value])
                )
            else:
                tile = self._tile // 4 if by_filter else self._tile
                items.append(self._element_items(i, part, tile, _in_order(part)))
            restore_items.append(self._element_items(i, part, self._tile, _dense(part)))
        all_items = np.concatenate(items)
        ways = more_ways | int(np.bitwise_or.reduce(all_items[:, 2]))
        if sum(part.weights.numel() for part in parts) < _SMALL_MODEL:
            ways |= _FILTER_WAYS if by_filter else _ELEMENT_WAYS
        return _Group(
            dtype,
            numbers,
            table=_on(self._device, np.array(rows, dtype=np.int64)),
            backups=_on(self._device, np.array([part.backup.data_ptr() for part in parts], dtype=np.int64)),
            items=_on(self._device, all_items),
            restore_items=_on(self._device, np.concatenate(restore_items)),
            has_clean=any(part.layout.clean_row is not None for part in parts),
            ways=ways,
        )

    def _element_items(self, number: int, part: Part, tile: int, vector: bool) -> np.ndarray:
        elements = part.weights.numel()
        return _items(number, elements, *(tile, kernels.VECTOR) if vector else (self._tile // 8, kernels.ANY))

    def _filter_items(self, number: int, part: Part, filters: int, size: int) -> np.ndarray:
        tile = self._tile
        if part.layout.axis == 0 and _in_order(part) and size % 4 == 0:
            if self._launch_options.hold and tile // 4 < size <= tile:
                return _items(number, filters, 1, kernels.HELD)
            if size < 128:
                return _items(number, filters, tile // 128, kernels.TWICE_32)
            if size < 1024:
                return _items(number, filters, tile // 512, kernels.TWICE_128)
            return _items(number, filters, 1, kernels.TWICE_LARGE)
        # Neighbours along axis 1 belong to different filters: many of these at once use whole cache lines.
        many = size <= 128 or part.layout.axis == 1
        return _items(number, filters, *(tile // 256, kernels.ANY_32) if many else (1, kernels.ANY_LARGE))


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
    dimensions = _merged_dimensions(part.weights) or []
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


def _merged_dimensions(tensor: Tensor) -> list[tuple[int, int]] | None:
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


def _in_order(part: Part) -> bool:
    """The noise's index counts as memory does, and is cut at multiples of four."""
    return _aligned(part) and _rows_without_gaps(part.weights) and part.first % 4 == 0


def _dense(part: Part) -> bool:
    """Without gaps, in whatever order: good enough to copy."""
    return _aligned(part) and _without_gaps(list(zip(part.weights.shape, part.weights.stride())))


def _pinned(values: np.ndarray, device: torch.device) -> Tensor:
    """For an asynchronous copy: torch keeps freed pinned memory until the copies from it are done."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _on(device: torch.device, values: np.ndarray) -> Tensor:
    return _pinned(values, device).to(device, non_blocking=True)
