"""Which launch of the fused kernels is fastest: tile and warps.

Device time from CUDA graphs. Compiles in parallel.
Without CUDA (TRITON_INTERPRET=1) it goes through the motions on tiny tensors, to be tested.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from functools import cache

import torch
from record import arguments, device_milliseconds, finish, milliseconds, summary
from torch import Tensor, nn

from smoothout import filters
from smoothout.filters import FilterLayout
from smoothout.fused import Fused
from smoothout.lab.models import build
from smoothout.noise import Uniform
from smoothout.tables import Launch, Part

ON_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if ON_CUDA else "cpu"
SCALES = {"absolute": filters.Absolute(), "filter": filters.Filter()}
# Four chunks of a tile, in each of which a thread does four elements or eight.
SHAPES = (
    [(512 * k * warps, warps) for warps in (2, 4, 8, 16) for k in (1, 2)][:-1] if ON_CUDA else [(1024, 2), (2048, 4)]
)
MILLIONS = 200 if ON_CUDA else 0


def network(name: str) -> list[Tensor]:
    model = build(name).to(memory_format=torch.channels_last)
    return [m.weight.detach() for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]


@cache
def weights(case: str, to_compile: bool) -> list[Tensor]:
    """Of a case; or fewer that need the same kernels."""
    if case == "200 M in matrices":
        rows = MILLIONS * 10**6 // 4096 // 8 if ON_CUDA and not to_compile else 64
        made = [torch.randn(rows, 4096 if ON_CUDA else 32, device=DEVICE) for _ in range(8)]
    elif case == "10,000 × 1,000":
        made = [torch.randn(5, 200) for _ in range(10_000 if ON_CUDA else 3)]
    else:
        made = network(case.split(",")[0].lower()) if ON_CUDA else network("resnet44")[:3]
    return [w.to(DEVICE) for w in made]


CASES = ["200 M in matrices", "ResNet18, channels-last", "ResNet44, channels-last", "10,000 × 1,000"]


def fused_for(case: str, scale: str, launch: Launch, to_compile: bool = False) -> Fused:
    parts = [
        Part(w, torch.empty_like(w), FilterLayout(0 if w.ndim > 1 else "element"), i, 0, 0)
        for i, w in enumerate(weights(case, to_compile))
    ]
    fused = Fused(parts, Uniform(), SCALES[scale], launch)
    fused.set_position(0, 0, 1e-6)
    return fused


def compile_one(job: tuple[str, str, Launch]) -> None:
    try:
        fused = fused_for(*job, to_compile=True)
        fused.apply()
        fused.restore()
        torch.cuda.synchronize()
    except Exception as error:  # the measurement will say so too
        print(f"does not compile: {job}: {error!r}"[:300])


def device_times(function, large: bool) -> list[float]:
    if ON_CUDA:
        return device_milliseconds(function, repeats=3 if large else 20, rounds=5)
    return [milliseconds(function, "cpu")]


def measure(case: str, scale: str, launch: Launch, copy: float) -> dict | None:
    """Milliseconds to draw and to restore, and bytes over a copy's."""
    try:
        fused = fused_for(case, scale, launch)
        large = case == CASES[0]
        draw, restore = summary(device_times(fused.apply, large)), summary(device_times(fused.restore, large))
    except Exception as error:
        print(f"failed: {case}, {scale}, {launch}: {error!r}"[:300])
        return None
    elements = sum(w.numel() for w in weights(case, False))
    both = draw["median"] + restore["median"]
    facts = {"case": case, "scale": scale, **launch.__dict__, "draw µs": 1e3 * draw["median"]}
    facts |= {"restore µs": 1e3 * restore["median"], "both µs": 1e3 * both}
    facts |= {
        "draw ÷ copy": 12 * elements / draw["median"] / 1e6 / copy,
        "both ÷ copy": 20 * elements / both / 1e6 / copy,
    }
    return facts


def copy_rate() -> float:
    """GB/s of a device-to-device copy of 200 M numbers."""
    source = torch.randn(max(MILLIONS * 10**6, 1000), device=DEVICE)
    target = torch.empty_like(source)
    target.copy_(source)  # not in a graph, whose copies go by another engine, at two thirds of the speed
    return (
        8 * len(source) / summary(milliseconds(lambda: target.copy_(source), DEVICE) for _ in range(11))["median"] / 1e6
    )


def compile_all(pool, jobs: list[tuple[str, str, Launch]]) -> None:
    if pool is not None:
        start = time.perf_counter()
        pool.map(compile_one, jobs, chunksize=1)
        print(f"{len(jobs)} launches compiled in {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    args = arguments(__doc__, keep=4)
    start = time.perf_counter()
    # A spawned process takes seconds to start: not more of them than cores.
    pool = multiprocessing.get_context("spawn").Pool(min(16, len(os.sched_getaffinity(0)))) if ON_CUDA else None
    pairs = list(itertools.product(CASES, SCALES))
    launches = [Launch(tile, warps) for tile, warps in SHAPES]
    compile_all(pool, [(case, scale, launch) for launch in launches for case, scale in pairs])
    copy = copy_rate()
    rows = []
    for pair in pairs:
        found = [row for launch in launches if (row := measure(*pair, launch, copy))]
        ranked = sorted(found, key=lambda row: row["both µs"])
        default = Launch().__dict__
        shown = [r for i, r in enumerate(ranked) if i < args.keep or all(r[k] == v for k, v in default.items())]
        rows += shown + [row for row in ranked[-1:] if row not in shown]
    if pool is not None:
        pool.terminate()
    columns = ["case", "scale", "tile", "warps"]
    columns += ["draw µs", "restore µs", "both µs", "draw ÷ copy", "both ÷ copy"]
    finish(args, columns, rows, f"{__doc__} A copy: {copy:.0f} GB/s. The best of each, the default, the slowest.")
    print(f"a copy: {copy:.0f} GB/s; {time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
