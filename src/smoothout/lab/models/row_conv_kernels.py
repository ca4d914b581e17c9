"""3 × 3 convolutions of whole rows of images, many ghosts in one launch: a row is fetched once for three taps.

What a kernel's middle column makes of a pixel stays where it is; what its left and right columns make of it belongs to
the pixel's neighbours, and is moved there in the end. So nine taps cost three fetches, where `ghost_conv_kernels`,
which can do everything, needs nine: at few channels it is the second-level cache that limits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _of_a_tap(
    weight, row, column,
    CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    """Channels × outputs; backwards, mirrored and transposed."""
    channel, output = tl.arange(0, CHANNELS)[:, None], tl.arange(0, COLUMNS)[None, :]
    if BACKWARDS:
        place = (channel * 9 + 8 - (row * 3 + column)) * OUTPUTS + output
    else:
        place = (output * 9 + row * 3 + column) * CHANNELS + channel
    return tl.load(weight + place, output < OUTPUTS, other=0.0)


@triton.jit
def _moved(values, by: tl.constexpr, WIDTH: tl.constexpr, PIXELS: tl.constexpr, COLUMNS: tl.constexpr):
    """Each pixel's values from the pixel `by` places on in its row; none where there is no such one."""
    rows: tl.constexpr = PIXELS // WIDTH
    source = tl.arange(0, WIDTH)[None, :, None] + by
    known = (source >= 0) & (source < WIDTH)
    source = tl.broadcast_to(tl.minimum(tl.maximum(source, 0), WIDTH - 1), (rows, WIDTH, COLUMNS))
    moved = tl.gather(tl.reshape(values, (rows, WIDTH, COLUMNS)), source, 1)
    return tl.reshape(tl.where(known, moved, 0.0), (PIXELS, COLUMNS))


@triton.jit(do_not_specialize=["pixels"])
def rows_kernel(
    images, weight, added, result, pixels, weight_stride,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr,
    BACKWARDS: tl.constexpr, PIXELS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """A tile of whole rows × outputs; `pixels` are those of one ghost. With ADDS the result is on top of `added`."""
    ghost = tl.program_id(1)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)[:, None]
    inside = pixel < pixels
    pixel += ghost * pixels
    weight += ghost * weight_stride
    at = pixel.to(tl.uint32)  # divided by a power of two, without a sign, is one instruction
    row = (at // WIDTH % HEIGHT).to(tl.int32)
    channel, output = tl.arange(0, CHANNELS)[None, :], tl.arange(0, COLUMNS)[None, :]
    left = tl.zeros((PIXELS, COLUMNS), tl.float32)
    middle = tl.zeros((PIXELS, COLUMNS), tl.float32)
    right = tl.zeros((PIXELS, COLUMNS), tl.float32)
    for down in range(3):
        exists = inside & ((row + (down - 1)).to(tl.uint32) < HEIGHT)
        rows = tl.load(images + (pixel + (down - 1) * WIDTH) * CHANNELS + channel, exists, other=0.0)
        taps = _of_a_tap(weight, down, 0, CHANNELS, OUTPUTS, COLUMNS, BACKWARDS)
        left = tl.dot(rows, taps, left, input_precision=PRECISION)
        taps = _of_a_tap(weight, down, 1, CHANNELS, OUTPUTS, COLUMNS, BACKWARDS)
        middle = tl.dot(rows, taps, middle, input_precision=PRECISION)
        taps = _of_a_tap(weight, down, 2, CHANNELS, OUTPUTS, COLUMNS, BACKWARDS)
        right = tl.dot(rows, taps, right, input_precision=PRECISION)
    total = middle + _moved(left, -1, WIDTH, PIXELS, COLUMNS) + _moved(right, 1, WIDTH, PIXELS, COLUMNS)
    place, exists = pixel * OUTPUTS + output, inside & (output < OUTPUTS)
    if ADDS:
        total += tl.load(added + place, exists, other=0.0).to(tl.float32)
    tl.store(result + place, total.to(result.dtype.element_ty), exists)


@triton.jit(do_not_specialize=["pixels"])
def row_weights_kernel(
    images, upstream, partials, pixels,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr,
    PIXELS: tl.constexpr, TAPS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """TAPS rows of taps × channels × outputs, summed over TILES tiles of a ghost's pixels.

    An image's pixel meets the gradients of its neighbours: the gradients are fetched for each column of taps, the
    images for each row.
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
