"""Time to draw and restore against the number of parameters (in 10 tensors) and of tensors (of 10 M parameters)."""

from __future__ import annotations

import torch
from record import Rows, arguments, device_milliseconds, finish, milliseconds, summary
from torch import nn

from smoothout import SmoothOut


def measure(elements: int, tensors: int, scale: str, device: str, rounds: int) -> dict:
    width = min(200, elements // tensors)
    shape = (max(elements // tensors // width, 1), width)
    model = nn.ParameterList(nn.Parameter(torch.randn(shape, device=device)) for _ in range(tensors))
    smooth = SmoothOut(model, scale=scale)
    p = smooth._perturbation

    def cycle() -> None:
        p.apply(0.01, 0)
        p.restore()

    cycle()
    row = {"parameters": sum(w.numel() for w in model), "tensors": tensors, "scale": scale}
    row["called ms"] = summary(milliseconds(cycle, device) for _ in range(rounds))
    if device == "cuda":
        row["device ms"] = summary(device_milliseconds(cycle, repeats=2, rounds=rounds))
    return row


def main() -> None:
    args = arguments(__doc__, rounds=7, largest=9)
    rows = Rows(args)
    for scale in ("absolute", "filter"):
        for power in range(4, args.largest + 1):
            rows.append(measure(10**power, 10, scale, args.device, args.rounds))
        for tensors in (10, 100, 1000, 10_000):
            rows.append(measure(10**7, tensors, scale, args.device, args.rounds))
    finish(args, ["scale", "parameters", "tensors", "called ms"] + ["device ms"] * (args.device == "cuda"), rows)


if __name__ == "__main__":
    main()
