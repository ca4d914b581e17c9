"""Device time of ReLU(BatchNorm(x) + residual) at the stages of ResNet44 with ghosts of 128: fused against torch's own.

bf16, channels-last, in graphs of many calls; with the same inputs on one stream, so that they stay in the L2 cache.
The sweep goes through the kernels' constants; "fused" are those that are set.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable

import torch
from record import Rows, arguments, device_milliseconds, finish, summary
from torch import Tensor, nn
from torch.nn import functional as F

from smoothout.lab.models import norm_relu_kernels as kernels
from smoothout.lab.models.norm_relu import norm_relu

Function = Callable[[nn.BatchNorm2d, Tensor, Tensor | None], Tensor]
STAGES = [(128, 16, 32, 32), (128, 32, 16, 16), (128, 64, 8, 8)]
# Warps, programs, elements of a tile.
SWEEP = [
    *[(4, 64, 4096), (4, 128, 4096), (4, 256, 4096), (4, 256, 2048)],
    *[(8, 64, 8192), (8, 128, 8192), (8, 256, 8192), (8, 128, 4096), (8, 256, 4096)],
]
STREAMS = 8


def plain(norm: nn.BatchNorm2d, x: Tensor, residual: Tensor | None) -> Tensor:
    return F.relu(norm(x) if residual is None else norm(x) + residual)


def inputs(shape: tuple[int, ...]) -> tuple[nn.BatchNorm2d, Tensor, Tensor]:
    norm = nn.BatchNorm2d(shape[1], device="cuda")
    x, residual = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
        for _ in range(2)
    )
    return norm, x, residual


def both(function: Function, norm: nn.BatchNorm2d, x: Tensor, residual: Tensor | None, upstream: Tensor) -> None:
    leaves = [x, norm.weight, norm.bias, *([] if residual is None else [residual])]
    torch.autograd.grad(function(norm, x, residual), leaves, upstream)


def microseconds(function: Function, shape: tuple[int, ...], with_residual: bool, rounds: int) -> dict[str, dict]:
    """Of the forward pass; of both passes; of both, if eight streams do it side by side, by the number of streams."""
    layers = [inputs(shape) for _ in range(STREAMS)]
    layers = [(norm, x, residual if with_residual else None) for norm, x, residual in layers]
    streams = [torch.cuda.Stream() for _ in layers]
    upstream = torch.randn_like(layers[0][1])

    def side_by_side() -> None:
        for stream, layer in zip(streams, layers):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(4):
                    both(function, *layer, upstream)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    passes = {
        "forward µs": (1, lambda: function(*layers[0])),
        "both µs": (1, lambda: both(function, *layers[0], upstream)),
        "both, 8 streams, µs": (4 * STREAMS, side_by_side),
    }
    return {
        name: summary(1e3 / calls * t for t in device_milliseconds(once, repeats=max(2, 20 // calls), rounds=rounds))
        for name, (calls, once) in passes.items()
    }


def set_constants(settings: tuple[int, int, int]) -> None:
    kernels.WARPS, kernels.PROGRAMS, kernels.TILE = settings


def compile_one(job: tuple[tuple[int, int, int], tuple[int, ...]]) -> None:
    set_constants(job[0])
    norm, x, residual = inputs(job[1])
    both(norm_relu, norm, x, residual, torch.randn_like(x))
    torch.cuda.synchronize()


def main() -> None:
    args = arguments(__doc__, rounds=7, sweep=1)
    if args.device != "cuda":
        raise SystemExit("device time needs a CUDA device")
    chosen = (kernels.WARPS, kernels.PROGRAMS, kernels.TILE)
    sweep = SWEEP if args.sweep else []
    if sweep:  # all at once, into Triton's cache
        with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
            pool.map(compile_one, itertools.product(sweep, STAGES), chunksize=1)
    rows = Rows(args)
    for shape, with_residual in itertools.product(STAGES, (False, True)):
        facts = {"shape": "×".join(map(str, shape)), "residual": with_residual}
        for what, function in (("plain", plain), ("fused", norm_relu)):
            rows.append(facts | {"what": what} | microseconds(function, shape, with_residual, args.rounds))
        for settings in sweep if with_residual else ():
            set_constants(settings)
            name = "{} warps, {} programs, tile {}".format(*settings)
            rows.append(facts | {"what": name} | microseconds(norm_relu, shape, with_residual, 3))
        set_constants(chosen)
    finish(args, ["shape", "residual", "what", "forward µs", "both µs", "both, 8 streams, µs"], rows, __doc__ or "")


if __name__ == "__main__":
    main()
