"""Memory that noise takes, in copies of the perturbed parameters: held for good, and the peak while drawing."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys

import torch
from record import Rows, arguments, finish
from torch import nn

from smoothout import SmoothOut

ELEMENTS = 64 * 2**20


def build(device: str) -> nn.Module:
    return nn.ParameterList(nn.Parameter(torch.ones(4096, 2048, device=device)) for _ in range(8))


def on_cuda(scale: str) -> dict[str, float]:
    model = build("cuda")
    size = torch.cuda.memory_allocated()
    smooth = SmoothOut(model, scale=scale)
    with smooth.perturbed():
        pass
    gc.collect()
    held = torch.cuda.memory_allocated() - size
    torch.cuda.reset_peak_memory_stats()
    with smooth.perturbed():
        pass
    peak = torch.cuda.max_memory_allocated() - size
    return {"held": held / (4 * ELEMENTS), "peak": peak / (4 * ELEMENTS)}


def on_cpu(scale: str) -> dict[str, float]:
    """The process's peak after a step, over that before: in a process of its own."""
    model = build("cpu")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    smooth = SmoothOut(model, scale=scale)
    for _ in range(3):
        with smooth.perturbed():
            pass
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {"peak": peak / (4 * ELEMENTS)}


def main() -> None:
    args = arguments(__doc__, child="")
    if args.child:
        print(on_cpu(args.child)["peak"])
        return
    rows = Rows(args)
    for scale in ("absolute", "filter"):
        if args.device == "cuda":
            measured = on_cuda(scale)
        else:
            command = [sys.executable, __file__, "--device", "cpu", "--child", scale]
            measured = {"peak": float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)}
        rows.append({"scale": scale, "parameters": ELEMENTS, **measured})
    finish(args, ["scale", "parameters"] + ["held"] * (args.device == "cuda") + ["peak"], rows)


if __name__ == "__main__":
    main()
