"""Device time of the convolutions of ResNet44's stages, 16 ghosts of 128 with their own weights: one launch for all.

bf16, channels-last, in graphs of many calls. "cuDNN" is one call a ghost, one after another. The sweep goes through the
kernels' tiles, warps and stages, and for the weights' gradient through the number of programs; "ours" are those that
are set.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable
from functools import partial

import torch
from record import Rows, arguments, device_milliseconds, finish, summary
from torch import Tensor
from torch.nn import functional as F

from smoothout.lab.models import ghost_conv_kernels as kernels
from smoothout.lab.models.ghost_conv_kernels import Tuning

GHOSTS, IMAGES = 16, 128
# Channels, outputs, size, stride; 3 × 3.
STAGES = [(16, 16, 32, 1), (32, 32, 16, 1), (64, 64, 8, 1), (3, 16, 32, 1), (16, 32, 32, 2), (32, 64, 16, 2)]
SWEPT = STAGES[:3]
WARPS, PROGRAMS = (4, 8), (512, 1024)
DIRECTIONS = ("forward", "images' gradient", "weights' gradient")
Layer = tuple[int, int, int, int]


def inputs(layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Images, weights, and gradients of the result."""
    channels, outputs, size, stride = layer
    weight = torch.randn(GHOSTS, outputs, 3, 3, channels, dtype=torch.bfloat16, device="cuda").permute(0, 1, 4, 2, 3)
    x, upstream = (
        torch.randn(GHOSTS * IMAGES, number, side, side, dtype=torch.bfloat16, device="cuda").to(
            memory_format=torch.channels_last
        )
        for number, side in ((channels, size), (outputs, size // stride))
    )
    return x, weight, upstream


def ours(direction: str, x: Tensor, weight: Tensor, upstream: Tensor, stride: int) -> None:
    if direction == "forward":
        kernels.forward(x, weight, stride, 1)
    elif direction == "images' gradient":
        kernels.input_gradient(upstream, weight, x, stride, 1)
    else:
        kernels.weight_gradient(upstream, x, weight, stride, 1)


def by_cudnn(direction: str, x: Tensor, weight: Tensor, upstream: Tensor, stride: int) -> None:
    wanted = [direction == "images' gradient", direction == "weights' gradient", False]
    for image, own, gradient in zip(x.chunk(GHOSTS), weight.unbind(), upstream.chunk(GHOSTS)):
        if direction == "forward":
            F.conv2d(image, own, stride=stride, padding=1)
        else:
            geometry = ([stride] * 2, [1, 1], [1, 1], False, [0, 0], 1)
            torch.ops.aten.convolution_backward(gradient, image, own, None, *geometry, wanted)


def microseconds(function: Callable[[], None], repeats: int, rounds: int) -> dict[str, float]:
    return summary(1e3 * t for t in device_milliseconds(function, repeats=repeats, rounds=rounds))


def sweep(layer: Layer, direction: str) -> list[Tuning]:
    """What may be chosen."""
    if direction == "weights' gradient":
        ways = itertools.product((64, 128), (64,), WARPS, (2, 3), PROGRAMS)
    else:
        ways = itertools.product((64, 128, 256), (16,), WARPS, (2, 3, 4))
    return list(itertools.starmap(Tuning, ways))


def set_tuning(layer: Layer, direction: str, tuning: Tuning) -> None:
    (kernels.WEIGHTS if direction == "weights' gradient" else kernels.IMAGES)[layer[0]] = tuning


def compile_one(job: tuple[Layer, str, Tuning]) -> None:
    layer, direction, tuning = job
    set_tuning(layer, direction, tuning)
    try:
        ours(direction, *inputs(layer), layer[3])
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, for one
        print(f"{job}: {error!r}"[:200])


def main() -> None:
    args = arguments(__doc__, rounds=7, sweep=1)
    if args.device != "cuda":
        raise SystemExit("device time needs a CUDA device")
    torch.backends.cudnn.benchmark = True  # as training has it
    jobs = [(layer, d, t) for layer, d in itertools.product(SWEPT, DIRECTIONS) for t in sweep(layer, d)]
    if args.sweep:  # all at once, into Triton's cache
        with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
            pool.map(compile_one, jobs, chunksize=4)
    rows, chosen = Rows(args), (kernels.IMAGES.copy(), kernels.WEIGHTS.copy())
    for layer, direction in itertools.product(STAGES, DIRECTIONS):
        if layer[0] == 3 and direction == "images' gradient":
            continue  # nothing asks for it
        facts = {"layer": "{} → {}, {}², stride {}".format(*layer), "what": direction}
        operands = (direction, *inputs(layer), layer[3])
        size = operands[1].numel() + operands[3].numel()
        for name, function, repeats in (("cuDNN", by_cudnn, 4), ("ours", ours, 20)):
            time = microseconds(partial(function, *operands), repeats, args.rounds)
            rows.append(facts | {"how": name, "µs": time, "TB/s": 2e-6 * size / time["median"]})
        tried = []
        for tuning in (job[2] for job in jobs if args.sweep and job[:2] == (layer, direction)):
            set_tuning(layer, direction, tuning)
            try:
                tried.append((microseconds(partial(ours, *operands), 5, 3), tuning))
            except Exception as error:
                print(f"{tuning}: {error!r}"[:200])
        kernels.IMAGES, kernels.WEIGHTS = (table.copy() for table in chosen)
        for time, tuning in sorted(tried, key=lambda one: one[0]["median"]):
            rows.append(facts | {"how": str(tuning), "µs": time, "TB/s": 2e-6 * size / time["median"]})
    finish(args, ["layer", "what", "how", "µs", "TB/s"], rows, __doc__ or "")


if __name__ == "__main__":
    main()
