"""Max-pooling of channels-last images, forward and backward, one thread an element. Imports Triton.

Places are numbers of 32 bits without a sign: divided by constants they take a few instructions, with 64 bits dozens.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _element(elements, C: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A thread's element of images of that size: which, whether it exists, its image, row, column and channel."""
    at = tl.program_id(0).to(tl.uint32) * BLOCK + tl.arange(0, BLOCK).to(tl.uint32)
    place = at // C
    row, column = (place // WIDTH % HEIGHT).to(tl.int32), (place % WIDTH).to(tl.int32)
    image, channel = (place // (WIDTH * HEIGHT)).to(tl.int32), (at % C).to(tl.int32)
    return at.to(tl.int32), at < elements, image, row, column, channel


@triton.jit
def pool_kernel(
    x, y, chosen, elements,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y ← the largest of each window, chosen ← its place there, the first of equals; NaN is larger than all."""
    at, inside, n, oh, ow, c = _element(elements, C, OH, OW, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    which = tl.zeros([BLOCK], tl.int32)
    for k in tl.static_range(KERNEL * KERNEL):
        h, w = oh * STRIDE - PADDING + k // KERNEL, ow * STRIDE - PADDING + k % KERNEL
        there = inside & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        value = tl.load(x + ((n * H + h) * W + w) * C + c, mask=there, other=float("-inf")).to(tl.float32)
        better = there & ((value > largest) | (value != value))
        largest = tl.where(better, value, largest)
        which = tl.where(better, k, which)
    tl.store(y + at, largest, mask=inside)
    tl.store(chosen + at, which.to(tl.uint8), mask=inside)


@triton.jit
def spread_kernel(
    dy, chosen, dx, elements,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx ← the sum of dy over the windows that chose each element: no atomics, so the order of the sum is fixed.

    An element lies in WINDOWS² windows at most.
    """
    at, inside, n, h, w, c = _element(elements, C, H, W, BLOCK)
    WINDOWS: tl.constexpr = (KERNEL + STRIDE - 1) // STRIDE
    top, left = h + PADDING, w + PADDING
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(WINDOWS * WINDOWS):
        oh, ow = top // STRIDE - i // WINDOWS, left // STRIDE - i % WINDOWS
        down, right = top - oh * STRIDE, left - ow * STRIDE  # the element's place in that window
        there = inside & (oh >= 0) & (oh < OH) & (down < KERNEL) & (ow >= 0) & (ow < OW) & (right < KERNEL)
        out = ((n * OH + oh) * OW + ow) * C + c
        # Both at once: a load that waits for what was chosen would double the time.
        which = tl.load(chosen + out, mask=there, other=255).to(tl.int32)
        value = tl.load(dy + out, mask=there, other=0.0).to(tl.float32)
        total += tl.where(which == down * KERNEL + right, value, 0.0)
    tl.store(dx + at, total, mask=inside)


@triton.jit
def pick_kernel(
    values, chosen, y, elements,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y ← of each window the element that was chosen: the transpose of `spread_kernel`, for second derivatives."""
    at, inside, n, oh, ow, c = _element(elements, C, OH, OW, BLOCK)
    k = tl.load(chosen + at, mask=inside, other=0).to(tl.int32)
    h, w = oh * STRIDE - PADDING + k // KERNEL, ow * STRIDE - PADDING + k % KERNEL
    tl.store(y + at, tl.load(values + ((n * H + h) * W + w) * C + c, mask=inside), mask=inside)
