"""Max-pooling of channels-last images, forward and backward, one thread an element. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pool_kernel(
    x, y, chosen, elements,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y ← the largest of each window, chosen ← its place there, the first of equals; NaN is larger than all."""
    out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = out < elements
    c, place = out % C, out // C
    ow, oh, n = place % OW, (place // OW) % OH, place // (OW * OH)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    which = tl.zeros([BLOCK], tl.int32)
    for k in tl.static_range(KERNEL * KERNEL):
        h, w = oh * STRIDE - PADDING + k // KERNEL, ow * STRIDE - PADDING + k % KERNEL
        there = inside & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        value = tl.load(x + ((n * H + h) * W + w) * C + c, mask=there, other=float("-inf")).to(tl.float32)
        better = there & ((value > largest) | (value != value))
        largest = tl.where(better, value, largest)
        which = tl.where(better, k, which)
    tl.store(y + out, largest, mask=inside)
    tl.store(chosen + out, which.to(tl.uint8), mask=inside)


@triton.jit
def spread_kernel(
    dy, chosen, dx, elements,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx ← the sum of dy over the windows that chose each element: no atomics, so the order of the sum is fixed."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    c, place = at % C, at // C
    w, h, n = place % W, (place // W) % H, place // (W * H)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(KERNEL * KERNEL):
        top, left = h + PADDING - k // KERNEL, w + PADDING - k % KERNEL
        oh, ow = top // STRIDE, left // STRIDE
        there = inside & (top >= 0) & (left >= 0) & (top % STRIDE == 0) & (left % STRIDE == 0) & (oh < OH) & (ow < OW)
        out = ((n * OH + oh) * OW + ow) * C + c
        is_chosen = tl.load(chosen + out, mask=there, other=255) == k
        total += tl.load(dy + out, mask=there & is_chosen, other=0.0).to(tl.float32)
    tl.store(dx + at, total, mask=inside)


@triton.jit
def pick_kernel(
    values, chosen, y, elements,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y ← of each window the element that was chosen: the transpose of `spread_kernel`, for second derivatives."""
    out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = out < elements
    c, place = out % C, out // C
    ow, oh, n = place % OW, (place // OW) % OH, place // (OW * OH)
    k = tl.load(chosen + out, mask=inside, other=0).to(tl.int64)
    h, w = oh * STRIDE - PADDING + k // KERNEL, ow * STRIDE - PADDING + k % KERNEL
    tl.store(y + out, tl.load(values + ((n * H + h) * W + w) * C + c, mask=inside), mask=inside)
