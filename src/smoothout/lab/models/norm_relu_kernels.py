"""BatchNorm (of a training batch), an optional sum and ReLU, fused: two Triton kernels forward and two backward.

An image batch in channels-last is a matrix of rows (pixels) × C. A program takes TILES tiles of BLOCK whole rows. The
first kernel of a direction leaves sums of every program, the second one combines them (each program does so for
itself: they are few and in the cache) and writes the rows. There are no atomics, so results repeat bit by bit.
Ghost batches, one after another in memory, are a second dimension of the grid: each has statistics of its own. The
first kernel of a direction begins with the last ghost, which was written last, the second with the first one, which the
first kernel read last: what is still in the cache is used before it is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# To be tuned. More programs fill a GPU better, but every one of them reads the sums of all.
PROGRAMS = 64  # of a ghost; with WARPS and TILE the fastest on eight streams at once, see benchmarks/norm_relu.py
PROGRAMS_OF_ALL = 1024  # where ghosts are few and large, theirs are more: these fill a GPU
FEWEST_TILES = 4  # of a program that is one of more
TILE = 4096  # elements that a program has in registers at once
GROUP = 4096  # elements of other programs' sums that it reads at once
WARPS = 4

# Rows of what the forward pass saves for the backward pass.
MEAN, INVERSE_DEVIATION, SCALE, SHIFT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _tile(tile, rows, C: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """Offsets of one of a program's tiles, and which of its rows exist."""
    row = (tl.program_id(0) * TILES + tile) * BLOCK + tl.arange(0, BLOCK)[:, None]
    return row * C + tl.arange(0, C)[None, :], (row < rows) & (tile < TILES)


@triton.jit
def _count(program, rows, AT_MOST: tl.constexpr):
    """How many rows a program has."""
    return tl.minimum(rows - program * AT_MOST, AT_MOST).to(tl.float32)


@triton.jit
def _vector(vectors, number, C: tl.constexpr):
    return tl.load(vectors + number * C + tl.arange(0, C))[None, :]


@triton.jit(do_not_specialize=["rows"])
def statistics_kernel(x, partials, rows, C: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """Per program and channel: the mean, and the sum of squared deviations from it."""
    ghost = tl.num_programs(1) - 1 - tl.program_id(1)
    x += ghost * rows * C
    partials += ghost * 2 * tl.num_programs(0) * C
    mean, squares = tl.zeros((BLOCK, C), tl.float32), tl.zeros((BLOCK, C), tl.float32)
    seen = tl.zeros((BLOCK, 1), tl.float32)
    # Welford's update, for every place of the tile by itself. Unrolled, loads need not wait for one another.
    for tile in tl.range(0, TILES, loop_unroll_factor=2):
        offset, inside = _tile(tile, rows, C, BLOCK, TILES)
        value = tl.load(x + offset, inside, other=0.0).to(tl.float32)
        step = tl.where(inside, value - mean, 0.0)
        mean += step / (tile + 1.0)
        squares += step * (value - mean)
        seen += inside.to(tl.float32)
    of_all = tl.sum(mean * seen, 0)[None, :] / _count(tl.program_id(0), rows, BLOCK * TILES)
    squares += seen * (mean - of_all) * (mean - of_all)
    to = partials + tl.program_id(0) * C + tl.arange(0, C)
    tl.store(to, tl.reshape(of_all, (C,)))
    tl.store(to + tl.num_programs(0) * C, tl.sum(squares, 0))


@triton.jit
def _combined_statistics(
    partials, rows, C: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations over all programs.

    Sums are taken about the first program's mean. It stands for 1/P of the data or more, so that what cancels in the
    end is at most P times as large as the result.
    """
    programs = tl.num_programs(0)
    about = _vector(partials, 0, C)
    first, second = tl.zeros((GROUP, C), tl.float32), tl.zeros((GROUP, C), tl.float32)
    for start in range(0, PROGRAMS, GROUP):
        program = start + tl.arange(0, GROUP)[:, None]
        place = partials + program * C + tl.arange(0, C)[None, :]
        count = tl.where(program < programs, _count(program, rows, BLOCK * TILES), 0.0)
        distance = tl.load(place, program < programs, other=0.0) - about
        first += count * distance
        second += tl.load(place + programs * C, program < programs, other=0.0) + count * distance * distance
    shift = tl.sum(first, 0)[None, :] / rows
    return about + shift, tl.maximum(tl.sum(second, 0)[None, :] - rows * shift * shift, 0.0)


@triton.jit(do_not_specialize=["rows", "momentum", "epsilon", "weight_stride", "bias_stride", "running_stride"])
def normalise_kernel(
    x, residual, y, partials, saved, weight, bias, running_mean, running_variance,
    rows, momentum, epsilon, weight_stride, bias_stride, running_stride,
    C: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """y ← relu(x̂·weight + bias (+ residual)); a ghost's first program also saves and moves its statistics.

    The strides lead from one ghost's vectors to the next one's; 0: they share them.
    """
    ghost = tl.program_id(1)
    first = ghost * rows * C
    x, residual, y = x + first, residual + first, y + first
    partials += ghost * 2 * tl.num_programs(0) * C
    saved += ghost * 4 * C
    weight, bias = weight + ghost * weight_stride, bias + ghost * bias_stride
    running_mean, running_variance = running_mean + ghost * running_stride, running_variance + ghost * running_stride
    # A tile is always on its way while the one before is done: the first one while sums are combined.
    offset, inside = _tile(0, rows, C, BLOCK, TILES)
    value = tl.load(x + offset, inside, other=0.0)
    added = value
    if HAS_RESIDUAL:
        added = tl.load(residual + offset, inside, other=0.0)
    mean, squares = _combined_statistics(partials, rows, C, BLOCK, TILES, GROUP, PROGRAMS)
    inverse_deviation = tl.rsqrt(squares / rows + epsilon)
    scale, shift = _vector(weight, 0, C) * inverse_deviation, _vector(bias, 0, C)
    if tl.program_id(0) == 0:
        channel = tl.arange(0, C)[None, :]
        tl.store(saved + MEAN * C + channel, mean)
        tl.store(saved + INVERSE_DEVIATION * C + channel, inverse_deviation)
        tl.store(saved + SCALE * C + channel, scale)
        tl.store(saved + SHIFT * C + channel, shift)
        kept = 1.0 - momentum
        tl.store(running_mean + channel, kept * _vector(running_mean, 0, C) + momentum * mean)
        unbiased = squares / (rows - 1.0)
        tl.store(running_variance + channel, kept * _vector(running_variance, 0, C) + momentum * unbiased)
    for tile in range(TILES):
        next_offset, next_inside = _tile(tile + 1, rows, C, BLOCK, TILES)
        next_value = tl.load(x + next_offset, next_inside, other=0.0)
        z = (value.to(tl.float32) - mean) * scale + shift  # x·scale + … would cancel at large means
        if HAS_RESIDUAL:
            next_added = tl.load(residual + next_offset, next_inside, other=0.0)
            z += added.to(tl.float32)
            added = next_added
        if RELU:
            z = tl.where(z <= 0.0, 0.0, z)  # keeps NaN, as torch does
        tl.store(y + offset, z.to(y.dtype.element_ty), inside)
        offset, inside, value = next_offset, next_inside, next_value


@triton.jit(do_not_specialize=["rows"])
def gradient_sums_kernel(
    upstream, x, y, gradient, saved, partials, rows,
    C: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Per program and channel: sums of g and g·x̂, where g is the gradient before ReLU; g too if there is a residual.

    Without a residual the sign of y follows from x, and y need not be read.
    """
    ghost = tl.num_programs(1) - 1 - tl.program_id(1)
    first = ghost * rows * C
    upstream, x, y, gradient = upstream + first, x + first, y + first, gradient + first
    partials += ghost * 2 * tl.num_programs(0) * C
    saved += ghost * 4 * C
    sums, products = tl.zeros((BLOCK, C), tl.float32), tl.zeros((BLOCK, C), tl.float32)
    mean, inverse_deviation = _vector(saved, MEAN, C), _vector(saved, INVERSE_DEVIATION, C)
    scale, shift = _vector(saved, SCALE, C), _vector(saved, SHIFT, C)
    for tile in tl.range(0, TILES, loop_unroll_factor=2):
        offset, inside = _tile(tile, rows, C, BLOCK, TILES)
        g = tl.load(upstream + offset, inside, other=0.0)
        centred = tl.load(x + offset, inside, other=0.0).to(tl.float32) - mean
        if HAS_RESIDUAL:
            if RELU:
                g = tl.where(tl.load(y + offset, inside, other=0.0) <= 0.0, 0.0, g)
            tl.store(gradient + offset, g, inside)
        elif RELU:
            g = tl.where(centred * scale + shift <= 0.0, 0.0, g)
        g = g.to(tl.float32)
        sums += g
        products += g * (centred * inverse_deviation)
    to = partials + tl.program_id(0) * C + tl.arange(0, C)
    tl.store(to, tl.sum(sums, 0))
    tl.store(to + tl.num_programs(0) * C, tl.sum(products, 0))


@triton.jit
def _combined_sums(partials, C: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr):
    programs = tl.num_programs(0)
    first, second = tl.zeros((GROUP, C), tl.float32), tl.zeros((GROUP, C), tl.float32)
    for start in range(0, PROGRAMS, GROUP):
        program = start + tl.arange(0, GROUP)[:, None]
        place = partials + program * C + tl.arange(0, C)[None, :]
        first += tl.load(place, program < programs, other=0.0)
        second += tl.load(place + programs * C, program < programs, other=0.0)
    return tl.sum(first, 0)[None, :], tl.sum(second, 0)[None, :]


@triton.jit(do_not_specialize=["rows"])
def input_gradient_kernel(
    upstream, x, dx, saved, partials, dweight, dbias, rows,
    C: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """dx ← scale·(g − mean(g) − x̂·mean(g·x̂)). With a residual, `upstream` is g already."""
    ghost = tl.program_id(1)
    first = ghost * rows * C
    upstream, x, dx = upstream + first, x + first, dx + first
    partials += ghost * 2 * tl.num_programs(0) * C
    saved += ghost * 4 * C
    dweight, dbias = dweight + ghost * C, dbias + ghost * C
    offset, inside = _tile(0, rows, C, BLOCK, TILES)
    value = tl.load(x + offset, inside, other=0.0)
    g = tl.load(upstream + offset, inside, other=0.0)
    mean, inverse_deviation = _vector(saved, MEAN, C), _vector(saved, INVERSE_DEVIATION, C)
    scale, shift = _vector(saved, SCALE, C), _vector(saved, SHIFT, C)
    sum_g, sum_product = _combined_sums(partials, C, GROUP, PROGRAMS)
    if tl.program_id(0) == 0:
        channel = tl.arange(0, C)[None, :]
        tl.store(dbias + channel, sum_g)
        tl.store(dweight + channel, sum_product)
    mean_g, slope = sum_g / rows, inverse_deviation * sum_product / rows
    for tile in range(TILES):
        next_offset, next_inside = _tile(tile + 1, rows, C, BLOCK, TILES)
        next_value = tl.load(x + next_offset, next_inside, other=0.0)
        next_g = tl.load(upstream + next_offset, next_inside, other=0.0)
        centred = value.to(tl.float32) - mean
        if RELU and not HAS_RESIDUAL:
            g = tl.where(centred * scale + shift <= 0.0, 0.0, g)
        result = scale * (g.to(tl.float32) - mean_g - centred * slope)
        tl.store(dx + offset, result.to(dx.dtype.element_ty), inside)
        offset, inside, value, g = next_offset, next_inside, next_value, next_g


# ---- launches --------------------------------------------------------------------------------------------------------


def _quotient(whole: int, part: int) -> int:
    """Rounded up."""
    return -(-whole // part)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


@dataclass(frozen=True)
class Geometry:
    """How matrices of rows × channels, one a ghost, are cut into programs."""

    ghosts: int
    rows: int
    programs: int
    constants: dict[str, int]
    reading: dict[str, int]  # of the programs' sums

    @classmethod
    def of(cls, x: Tensor, ghosts: int) -> Geometry:
        channels = x.shape[1]
        rows, block = x.numel() // channels // ghosts, max(1, TILE // channels)
        most = max(PROGRAMS, min(PROGRAMS_OF_ALL // ghosts, rows // (block * FEWEST_TILES)))
        # A power of two: a kernel is compiled for every number of tiles.
        tiles = _power_of_two(_quotient(rows, block * most))
        constants = {"C": channels, "BLOCK": block, "TILES": tiles, "num_warps": WARPS}
        programs = _quotient(rows, block * tiles)
        at_once = min(max(1, GROUP // channels), _power_of_two(programs))
        return cls(ghosts, rows, programs, constants, {"GROUP": at_once, "PROGRAMS": _power_of_two(programs)})

    def partials(self, x: Tensor) -> Tensor:
        return torch.empty(self.ghosts, 2, self.programs, x.shape[1], dtype=torch.float32, device=x.device)

    def launch(self, kernel: Any, *operands: Any, **constants: Any) -> None:
        kernel[(self.programs, self.ghosts)](*operands, **self.constants, **constants)


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_variance: Tensor,
    momentum: float,
    epsilon: float,
    relu: bool = True,
) -> tuple[Tensor, Tensor]:
    """The result, and what `backward` needs of the statistics. Running statistics move.

    Vectors (weight, bias, running statistics) are of channels, or of ghosts × channels for as many ghosts.
    """
    ghosts = len(weight) if weight.dim() == 2 else 1
    geometry = Geometry.of(x, ghosts)
    partials, y = geometry.partials(x), torch.empty_like(x)
    saved = torch.empty(ghosts, 4, x.shape[1], dtype=torch.float32, device=x.device)
    strides = (t.stride(0) if t.dim() == 2 else 0 for t in (weight, bias, running_mean))
    geometry.launch(statistics_kernel, x, partials, geometry.rows)
    geometry.launch(
        normalise_kernel,
        *(x, x if residual is None else residual, y, partials, saved, weight, bias, running_mean, running_variance),
        *(geometry.rows, momentum, epsilon, *strides),
        **geometry.reading,
        HAS_RESIDUAL=residual is not None,
        RELU=relu,
    )
    return y, saved


def backward(
    upstream: Tensor, x: Tensor, y: Tensor | None, saved: Tensor, relu: bool = True
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of x, residual, weight and bias (ghosts × channels); y is needed if there was a residual."""
    geometry = Geometry.of(x, len(saved))
    partials, dx = geometry.partials(x), torch.empty_like(x)
    dweight, dbias = (torch.empty(len(saved), x.shape[1], dtype=saved.dtype, device=x.device) for _ in range(2))
    gradient = None if y is None else torch.empty_like(y)
    constants = {"HAS_RESIDUAL": y is not None, "RELU": relu}
    geometry.launch(
        gradient_sums_kernel,
        *(upstream, x, x if y is None else y, dx if gradient is None else gradient, saved, partials, geometry.rows),
        **constants,
    )
    geometry.launch(
        input_gradient_kernel,
        *(upstream if gradient is None else gradient, x, dx, saved, partials, dweight, dbias, geometry.rows),
        **geometry.reading,
        **constants,
    )
    return dx, gradient, dweight, dbias


def rehearse(device: torch.device) -> None:
    """Compile and run once on a few numbers: a machine may lack what Triton needs."""
    x, ones = torch.ones(2, 8, 1, 1, device=device), torch.ones(8, device=device)
    y, saved = forward(x, None, ones, ones, ones.clone(), ones.clone(), 0.1, 1e-5)
    backward(torch.ones_like(y), x, None, saved)
