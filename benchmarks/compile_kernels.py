"""Compile the fused kernels of every noise, scale and dtype, in parallel: so that what comes after does not wait."""

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


def main() -> None:
    start = time.perf_counter()
    jobs = sorted(itertools.product(range(3), range(3), range(3), (False, True)), key=lambda job: job[1])
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    print(f"{len(jobs)} kinds of kernels compiled in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
