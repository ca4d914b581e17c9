"""Tensors for the tests of the fused kernels, and kernels for them."""

import torch

from interpreter import DEVICE, INTERPRETED
from smoothout import Uniform, filters
from smoothout.filters import FilterLayout

# Every way that the kernels have to do a part: (shape, layout).
TENSORS = {
    "narrow filters": ((9, 12), FilterLayout(0)),
    "filters of a few hundred": ((5, 300), FilterLayout(0)),
    "filters of a thousand": ((2, 1200), FilterLayout(0)),
    "filters beyond a tile": ((1, 3000), FilterLayout(0)),
    "odd filters": ((7, 27), FilterLayout(0)),
    "large odd filters": ((2, 301), FilterLayout(0)),
    "biases": ((10,), FilterLayout("element")),
    "a scalar": ((), FilterLayout("element")),
    "columns": ((20, 6), FilterLayout(1)),
    "transposed, in groups": ((8, 6, 3, 3), FilterLayout(1, groups=2)),
    "with a clean row": ((6, 8), FilterLayout(0, clean_row=2)),
    "empty": ((0, 4), FilterLayout(0)),
}


def weights(dtype=torch.float32):
    return [torch.randn(shape, device=DEVICE).to(dtype) for shape, _ in TENSORS.values()]


def kernels_for(tensors, noise=None, scale=None, layouts=None, launch=None, **numbers):
    from smoothout.fused import Fused, can_fuse
    from smoothout.tables import Launch, Part

    noise, scale = noise or Uniform(), scale or filters.Absolute()
    layouts = layouts or [layout for _, layout in TENSORS.values()]
    parts = [
        Part(w, torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device=w.device), layout, i, 0, 0)
        for i, (w, layout) in enumerate(zip(tensors, layouts))
    ]
    parts = [Part(**(part.__dict__ | numbers)) for part in parts]
    assert can_fuse(parts, noise)
    return Fused(parts, noise, scale, Launch(**launch or {}))


def noise_of(tensors, strength=1.0, seed=1, step=0, draw=0, **others):
    fused = kernels_for(tensors, **others)
    fused.set_position(seed, step, strength)
    return fused.noise(draw)


def assert_equal(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one, other)


def philox(key, counter, rounds=10):
    """Philox 4×32 (Salmon et al., 2011) in Python's integers."""
    k0, k1, (c0, c1, c2, c3) = key % 2**32, key >> 32, counter
    for _ in range(rounds):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b % 2**32, (a >> 32) ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def rounded(values, dtype):
    if INTERPRETED and dtype is torch.bfloat16:  # the interpreter cuts off where the hardware rounds
        return (values.view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)
    return values.to(dtype)
