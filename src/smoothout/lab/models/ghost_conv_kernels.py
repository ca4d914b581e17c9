"""Convolutions of many ghost batches, each with its own weights, in one launch a direction.

Images are in channels-last, so a convolution is a product of matrices: pixels × k with k × outputs, where k counts
taps and channels and lies in memory as the weights have it, (ghost, outputs, rows, columns, channels). The matrix of
patches is gathered tile by tile and never written. The gradient of the images is the same product with the roles of
outputs and channels exchanged. That of the weights is summed over splits of the pixels, then over splits: there are no
atomics, so results repeat bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Tuning:
    """Sizes of a kernel's tiles: pixels, and taps × channels at least; then what the compiler is told.

    Patches are fetched some stages ahead, sixteen bytes at a time and so past the L1 cache: each pixel comes from L2
    once for every tap. Eight bytes at a time would go through L1, where taps of neighbours meet: a third slower.
    """

    pixels: int
    depth: int
    warps: int
    stages: int
    programs: int = 0  # of the weights' gradient: into how many its pixels are split, about


# By channels, up to so many; the last one for all others. See benchmarks/ghost_conv.py.
IMAGES = {
    4: Tuning(pixels=256, depth=64, warps=8, stages=2),
    **dict.fromkeys((3, 16, 32), Tuning(pixels=256, depth=16, warps=4, stages=4)),
    64: Tuning(pixels=128, depth=16, warps=4, stages=3),
}
WEIGHTS = {
    16: Tuning(pixels=128, depth=64, warps=4, stages=3, programs=512),
    32: Tuning(pixels=64, depth=64, warps=8, stages=3, programs=512),
    64: Tuning(pixels=64, depth=64, warps=4, stages=2, programs=512),
}
# Of `row_weights_kernel`, at all and with three rows of taps at once: its sums are held in registers, which those of
# fp32, without tensor cores, overflow.
MOST_CHANNELS_BY_ROWS, MOST_CHANNELS_OF_THREE_ROWS = 64, 32
SUMMED_AT_ONCE, BLOCK_OF_SUMS = 16, 128  # splits of the weights' gradient, and elements of it


def tuning_for(channels: int, table: dict[int, Tuning]) -> Tuning:
    """Of IMAGES or WEIGHTS."""
    return table[min((most for most in table if channels <= most), default=max(table))]


@triton.jit
def _patches(
    images, pixel, start, inside,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    BACKWARDS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """What a kernel sees for some pixels of the result (n × 1), from the tap and channel `start` on.

    Backwards: from which pixels of `images`, then the result's gradients, something comes to these.
    """
    at = pixel.to(tl.uint32)  # divided by a power of two, without a sign, is one instruction
    column, row = (at % OUT_WIDTH).to(tl.int32), (at // OUT_WIDTH % OUT_HEIGHT).to(tl.int32)
    image = (at // (OUT_WIDTH * OUT_HEIGHT)).to(tl.int32)
    if CHANNELS == DEPTH:  # one tap: a mask a pixel
        tap, channel = start // CHANNELS, tl.arange(0, DEPTH)[None, :]
    else:
        k = start + tl.arange(0, DEPTH)[None, :]
        tap, channel = k // CHANNELS, k % CHANNELS
        inside = inside & (tap < KERNEL * KERNEL)
    down, right = tap // KERNEL, tap % KERNEL
    if BACKWARDS:
        h, w = row + PADDING, column + PADDING
        down, right = -down, -right
    else:
        h, w = row * STRIDE - PADDING, column * STRIDE - PADDING
    # What depends on the pixel alone is computed once, before the loop over taps.
    if HEIGHT == OUT_HEIGHT and WIDTH == OUT_WIDTH and STRIDE == 1:
        corner = (pixel + (h - row) * WIDTH + (w - column)) * CHANNELS
    else:
        corner = ((image * HEIGHT + h) * WIDTH + w) * CHANNELS
    h, w = h + down, w + right
    if BACKWARDS and STRIDE > 1:
        inside = inside & (h % STRIDE == 0) & (w % STRIDE == 0)
        h, w = h // STRIDE, w // STRIDE
        offset = ((image * HEIGHT + h) * WIDTH + w) * CHANNELS + channel
    else:
        offset = corner + ((down * WIDTH + right) * CHANNELS + channel)
    # Unsigned, so that what is negative is too large as well.
    inside = inside & (h.to(tl.uint32) < HEIGHT) & (w.to(tl.uint32) < WIDTH)
    return tl.load(images + offset, inside, other=0.0)


@triton.jit
def _weights(
    weight, start,
    CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, KERNEL: tl.constexpr, BACKWARDS: tl.constexpr,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The weights that belong to the patches from `start` on; backwards, transposed."""
    output, k = tl.arange(0, COLUMNS)[None, :], start + tl.arange(0, DEPTH)[:, None]
    if BACKWARDS:
        place = (k % CHANNELS) * (KERNEL * KERNEL * OUTPUTS) + (k // CHANNELS) * OUTPUTS + output
    else:
        place = output * (KERNEL * KERNEL * CHANNELS) + k
    return tl.load(weight + place, (k < KERNEL * KERNEL * CHANNELS) & (output < OUTPUTS), other=0.0)


@triton.jit(do_not_specialize=["pixels"])
def images_kernel(
    images, weight, added, shift, result, pixels, weight_stride,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BACKWARDS: tl.constexpr,
    PIXELS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    ADDS: tl.constexpr, SHIFTS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """A tile of pixels × outputs; `pixels` are those of one ghost. Backwards, outputs are the inputs' gradients.

    With ADDS the result is on top of `added`, with SHIFTS of a number an output.
    """
    ghost = tl.program_id(1)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)[:, None]
    inside = pixel < pixels
    pixel += ghost * pixels
    output = tl.arange(0, COLUMNS)[None, :]
    weight += ghost * weight_stride
    place, exists = pixel * OUTPUTS + output, inside & (output < OUTPUTS)
    total = tl.zeros((PIXELS, COLUMNS), tl.float32)
    if ADDS:
        total += tl.load(added + place, exists, other=0.0).to(tl.float32)
    if SHIFTS:
        total += tl.load(shift + output, output < OUTPUTS, other=0.0)
    for start in range(0, KERNEL * KERNEL * CHANNELS, DEPTH):
        patches = _patches(
            images, pixel, start, inside,
            CHANNELS, HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH, KERNEL, STRIDE, PADDING, BACKWARDS, DEPTH,
        )  # fmt: skip
        weights = _weights(weight, start, CHANNELS, OUTPUTS, KERNEL, BACKWARDS, DEPTH, COLUMNS)
        total = tl.dot(patches, weights, total, input_precision=PRECISION)
    if RELU:
        total = tl.where(total < 0, 0.0, total)  # what is not a number stays so
    tl.store(result + place, total.to(result.dtype.element_ty), exists)


@triton.jit(do_not_specialize=["pixels"])
def weights_kernel(
    images, upstream, partials, pixels,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    PIXELS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Taps × channels × outputs, summed over TILES tiles of a ghost's pixels, which neighbours have in the cache."""
    ghost = tl.program_id(2)
    start = tl.program_id(0) * DEPTH
    output = tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((DEPTH, COLUMNS), tl.float32)
    for tile in range(TILES):
        pixel = (tl.program_id(1) * TILES + tile) * PIXELS + tl.arange(0, PIXELS)[:, None]
        inside = pixel < pixels
        pixel += ghost * pixels
        patches = _patches(
            images, pixel, start, inside,
            CHANNELS, HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH, KERNEL, STRIDE, PADDING, False, DEPTH,
        )  # fmt: skip
        gradient = tl.load(upstream + pixel * OUTPUTS + output, inside & (output < OUTPUTS), other=0.0)
        total = tl.dot(tl.trans(patches), gradient, total, input_precision=PRECISION)
    k = start + tl.arange(0, DEPTH)[:, None]
    of_one = tl.program_id(1) * tl.num_programs(2) + ghost
    place = (of_one * OUTPUTS + output) * (KERNEL * KERNEL * CHANNELS) + k
    tl.store(partials + place, total, (k < KERNEL * KERNEL * CHANNELS) & (output < OUTPUTS))


@triton.jit(do_not_specialize=["pixels"])
def row_weights_kernel(
    images, upstream, partials, pixels,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr,
    PIXELS: tl.constexpr, TAPS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """The same for 3 × 3 kernels and as large results: TAPS rows of taps × channels × outputs at once.

    An image's pixel meets the gradients of its neighbours: the gradients are fetched for each column of taps, the
    images for each row, where `weights_kernel` fetches the images for each of nine taps through the second-level cache.
    """
    ghost = tl.program_id(2)
    k, output = tl.arange(0, DEPTH)[None, :], tl.arange(0, COLUMNS)[None, :]
    down, channel = tl.program_id(0) * TAPS + k // CHANNELS, k % CHANNELS
    left = tl.zeros((DEPTH, COLUMNS), tl.float32)
    middle = tl.zeros((DEPTH, COLUMNS), tl.float32)
    right = tl.zeros((DEPTH, COLUMNS), tl.float32)
    for tile in range(TILES):
        pixel = (tl.program_id(1) * TILES + tile) * PIXELS + tl.arange(0, PIXELS)[:, None]
        inside = pixel < pixels
        pixel += ghost * pixels
        at = pixel.to(tl.uint32)
        column, row = at % WIDTH, (at // WIDTH % HEIGHT).to(tl.int32)
        exists = inside & (k < TAPS * CHANNELS) & ((row + down - 1).to(tl.uint32) < HEIGHT)
        rows = tl.trans(tl.load(images + (pixel + (down - 1) * WIDTH) * CHANNELS + channel, exists, other=0.0))
        # The pixel under a kernel's left column is the left neighbour of the kernel's place.
        place, known = upstream + pixel * OUTPUTS + output, inside & (output < OUTPUTS)
        gradient = tl.load(place + OUTPUTS, known & (column != WIDTH - 1), other=0.0)
        left = tl.dot(rows, gradient, left, input_precision=PRECISION)
        middle = tl.dot(rows, tl.load(place, known, other=0.0), middle, input_precision=PRECISION)
        gradient = tl.load(place - OUTPUTS, known & (column != 0), other=0.0)
        right = tl.dot(rows, gradient, right, input_precision=PRECISION)
    k, output = tl.arange(0, DEPTH)[:, None], tl.arange(0, COLUMNS)[None, :]
    down, channel = tl.program_id(0) * TAPS + k // CHANNELS, k % CHANNELS
    of_one = tl.program_id(1) * tl.num_programs(2) + ghost
    place = partials + ((of_one * OUTPUTS + output) * 9 + down * 3) * CHANNELS + channel
    exists = (k < TAPS * CHANNELS) & (output < OUTPUTS)
    tl.store(place, left, exists)
    tl.store(place + CHANNELS, middle, exists)
    tl.store(place + 2 * CHANNELS, right, exists)


@triton.jit(do_not_specialize=["elements"])
def sum_kernel(partials, result, elements, SPLITS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Over splits, always in the same order; a group of them is on its way at once."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((GROUP, BLOCK), tl.float32)
    for start in range(0, SPLITS, GROUP):
        split = start + tl.arange(0, GROUP)[:, None]
        total += tl.load(partials + split * elements + place, (split < SPLITS) & (place < elements), other=0.0)
    tl.store(result + place, tl.sum(total, 0)[None, :].to(result.dtype.element_ty), place < elements)


# ---- launches --------------------------------------------------------------------------------------------------------


def _quotient(whole: int, part: int) -> int:
    """Rounded up."""
    return -(-whole // part)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _width(channels: int) -> int:
    """Of a tile: products of matrices are of 16 columns or more."""
    return max(16, _power_of_two(channels))


def _depth(least: int, channels: int, kernel: int) -> int:
    """Of a tile: whole taps; of the few channels of an image all taps together."""
    whole = _width(kernel**2 * channels)
    return min(64 if channels % 16 else max(least, _power_of_two(channels)), whole)


def _compiled(tuning: Tuning, channels: int, kernel: int, columns: int, dtype: torch.dtype) -> dict[str, Any]:
    in_full = dtype == torch.float32  # without tensor cores: deeper or wider tiles do not fit into registers
    return {
        "PIXELS": 64 if in_full else tuning.pixels,
        "DEPTH": 16 if in_full else _depth(tuning.depth, channels, kernel),
        "COLUMNS": _width(columns),
        "PRECISION": "ieee" if in_full else "tf32",  # says something of fp32 only
        "num_warps": tuning.warps,
        "num_stages": tuning.stages,
    }


def _launch(kernel: Any, grid: tuple[int, ...], *operands: Any, **constants: Any) -> None:
    kernel[grid](*operands, **constants)


def _images(
    source: Tensor,
    weight: Tensor,
    result: Tensor,
    stride: int,
    padding: int,
    backwards: bool,
    added: Tensor | None = None,
    shift: Tensor | None = None,
    relu: bool = False,
) -> None:
    ghosts, kernel = len(weight), weight.shape[-1]
    pixels = result.numel() // result.shape[1] // ghosts
    tuning = tuning_for(source.shape[1], IMAGES)
    constants = _compiled(tuning, source.shape[1], kernel, result.shape[1], source.dtype)
    grid = (_quotient(pixels, constants["PIXELS"]), ghosts)
    others = (result if added is None else added, result if shift is None else shift)
    operands = (source, weight, *others, result, pixels, weight.stride(0))
    after = {"ADDS": added is not None, "SHIFTS": shift is not None, "RELU": relu}
    geometry = (*source.shape[1:], *result.shape[1:], kernel, stride, padding, backwards)
    _launch(images_kernel, grid, *operands, *geometry, **constants, **after)


def forward(
    x: Tensor,
    weight: Tensor,
    stride: int,
    padding: int,
    added: Tensor | None = None,
    shift: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """x: (ghosts · images) × channels × …, channels-last; weight: ghosts × outputs × channels × kernel × kernel.

    Args:
        added: like the result, channels-last.
        shift: a number an output, in fp32.
    """
    kernel = weight.shape[-1]
    height, width = ((size + 2 * padding - kernel) // stride + 1 for size in x.shape[2:])
    y = _empty((len(x), weight.shape[1], height, width), x)
    _images(x, weight, y, stride, padding, False, added, shift, relu)
    return y


def input_gradient(
    upstream: Tensor, weight: Tensor, x: Tensor, stride: int, padding: int, added: Tensor | None = None
) -> Tensor:
    """Of x, which only says its shape; on top of what is added."""
    dx = _empty(x.shape, x)
    _images(upstream, weight, dx, stride, padding, True, added)
    return dx


def weight_gradient(upstream: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Of the weight, which only says its shape, its dtype, and its strides within a ghost."""
    ghosts, outputs, channels, kernel, _ = weight.shape
    pixels, depth = upstream.numel() // outputs // ghosts, kernel**2 * channels
    tuning = tuning_for(channels, WEIGHTS)
    constants = _compiled(tuning, channels, kernel, outputs, x.dtype)
    few = max(channels, outputs) <= MOST_CHANNELS_BY_ROWS and x.dtype != torch.float32
    by_rows = (kernel, stride, padding) == (3, 1, 1) and channels >= 16 and few
    if by_rows:
        taps = 3 if channels <= MOST_CHANNELS_OF_THREE_ROWS else 1
        constants |= {"TAPS": taps, "DEPTH": _power_of_two(taps * channels)}
    blocks = 3 // constants["TAPS"] if by_rows else _quotient(depth, constants["DEPTH"])
    wanted = max(1, tuning.programs // (blocks * ghosts))
    tiles = _power_of_two(_quotient(pixels, wanted * constants["PIXELS"]))  # a kernel is compiled for each number
    splits = _quotient(pixels, tiles * constants["PIXELS"])
    partials = torch.empty(splits, ghosts, outputs, depth, dtype=torch.float32, device=x.device)
    grid, operands = (blocks, splits, ghosts), (x, upstream, partials, pixels, *x.shape[1:])
    if by_rows:
        _launch(row_weights_kernel, grid, *operands, outputs, **constants, TILES=tiles)
    else:
        geometry = (*upstream.shape[1:], kernel, stride, padding)
        _launch(weights_kernel, grid, *operands, *geometry, **constants, TILES=tiles)
    result = torch.empty(ghosts, outputs, depth, dtype=weight.dtype, device=x.device)
    elements = result.numel()
    shape = {"GROUP": SUMMED_AT_ONCE, "BLOCK": BLOCK_OF_SUMS, "num_warps": 4}
    _launch(sum_kernel, (_quotient(elements, BLOCK_OF_SUMS),), partials, result, elements, SPLITS=splits, **shape)
    # Of 1 × 1 kernels there are two spellings of the strides; one kernel copies many gradients only if all agree.
    return torch.as_strided(result, weight.shape, (outputs * depth, *weight.stride()[1:]))


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def rehearse(device: torch.device) -> None:
    """Compile and run once on a few numbers: a machine may lack what Triton needs."""
    x, weight = torch.ones(1, 16, 1, 1, device=device), torch.ones(1, 16, 16, 1, 1, device=device)
    y = forward(x, weight, 1, 0)
    input_gradient(y, weight, x, 1, 0)
    weight_gradient(y, x, weight, 1, 0)
