"""Compile in parallel, so that what comes after does not wait: the fused kernels of every noise, scale and dtype.

And those of ResNet44's layers in bf16, for 16 ghosts of 128 and of 53 images (the last batch of CIFAR-10).
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time


def compile_one(job: tuple[int, int, int, bool]) -> None:
    import torch

    from smoothout import filters, noise
    from smoothout.fused import Fused
    from smoothout.tables import Part

    law = (noise.Uniform(), noise.Gaussian(), noise.Rademacher())[job[0]]
    scale = (filters.Filter(), filters.Absolute(), filters.Weight())[job[1]]
    weights = torch.ones(8, 8, device="cuda", dtype=(torch.float32, torch.bfloat16, torch.float16)[job[2]])
    layout = filters.FilterLayout(0, clean_row=1 if job[3] else None)
    fused = Fused([Part(weights, torch.empty_like(weights), layout, 0, 0, 0)], law, scale)
    fused.set_position(0, 0, 1.0)
    fused.apply()
    fused.restore()
    if job[2] == 0:
        fused.noise()
    torch.cuda.synchronize()


# Channels, outputs, kernel, size, stride.
LAYERS = [
    *[(3, 16, 3, 32, 1), (16, 16, 3, 32, 1), (16, 32, 3, 32, 2), (16, 32, 1, 32, 2), (32, 32, 3, 16, 1)],
    *[(32, 64, 3, 16, 2), (32, 64, 1, 16, 2), (64, 64, 3, 8, 1)],
]


def compile_layer(job: tuple[tuple[int, int, int, int, int], int]) -> None:
    import torch

    from smoothout.lab.models.ghost_conv import ghost_conv
    from smoothout.lab.models.stacked_norm import stacked_norm

    (channels, outputs, kernel, size, stride), images = job
    x = torch.randn(16 * images, size, size, channels, device="cuda", dtype=torch.bfloat16).permute(0, 3, 1, 2)
    weight = torch.randn(16, outputs, kernel, kernel, channels, device="cuda", dtype=x.dtype).permute(0, 1, 4, 2, 3)
    scale, shift = (torch.ones(16, outputs, device="cuda").requires_grad_() for _ in range(2))
    statistics = (torch.zeros(16, outputs, device="cuda"), torch.zeros(16, outputs, device="cuda"))
    leaves = [weight.requires_grad_(), scale, *([x.requires_grad_()] if channels > 3 else [])]
    y = ghost_conv(x, weight, stride, kernel // 2)
    for residual in (None, y):
        z = stacked_norm(y, scale, shift, statistics, 1e-5, residual, relu=kernel > 1)
        torch.autograd.grad(z, leaves, torch.randn_like(z), retain_graph=True)
    torch.cuda.synchronize()


def main() -> None:
    start = time.perf_counter()
    jobs = sorted(itertools.product(range(3), range(3), range(3), (False, True)), key=lambda job: job[1])
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        pool.map(compile_one, jobs, chunksize=1)
        pool.map(compile_layer, itertools.product(LAYERS, (128, 53)), chunksize=1)
    print(f"{len(jobs)} kinds of noise and {len(LAYERS)} of layers compiled in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
