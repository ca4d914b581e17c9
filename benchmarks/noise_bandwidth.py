"""Bytes per second of the fused kernels against a device-to-device copy, for the bytes that they must move.

To draw, back up and apply, each weight is read once, its backup and the weight written once: 12 bytes in fp32. To
restore: 8 bytes. A copy reads and writes: 8 bytes. Device time, from CUDA graphs: what the host does meanwhile is in
`step_overhead.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from record import Rows, arguments, device_milliseconds, finish, milliseconds, summary
from torch import nn

from smoothout import SmoothOut


def copy_times(target: torch.Tensor, source: torch.Tensor, args: argparse.Namespace, repeats: int = 10) -> list[float]:
    """Of one copy, called many times: a graph's copies go by another engine, at two thirds of the speed."""

    def copies() -> None:
        for _ in range(repeats):
            target.copy_(source)

    copies()
    return [milliseconds(copies, args.device) / repeats for _ in range(args.rounds)]


def times(function: Callable[[], Any], args: argparse.Namespace) -> list[float]:
    if args.device == "cuda":
        return device_milliseconds(function, repeats=3, rounds=args.rounds)
    return [milliseconds(function, args.device) for _ in range(args.rounds)]


def main() -> None:
    args = arguments(__doc__, millions=200, rounds=25)
    rows_of_matrix = args.millions * 1_000_000 // 4096 // 8
    rows = Rows(args)
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.ParameterList(
            nn.Parameter(torch.randn(rows_of_matrix, 4096, dtype=dtype, device=args.device)) for _ in range(8)
        )
        elements, size = sum(p.numel() for p in model), model[0].element_size()
        source = torch.randn(elements, dtype=dtype, device=args.device)
        target = torch.empty_like(source)
        copy = summary(2 * elements * size / t / 1e6 for t in copy_times(target, source, args))
        rows.append({"what": "copy", "dtype": str(dtype), "elements": elements, "GB/s": copy, "÷ copy": 1.0})
        for noise in ("uniform", "gaussian", "rademacher"):
            for scale in ("absolute", "filter"):
                perturbation = SmoothOut(model, noise=noise, scale=scale)._perturbation
                perturbation.set_position(1e-6, 0)
                fused = perturbation._fused
                assert fused is not None, "this is about the fused kernels: it needs CUDA and Triton"
                draws, restores = times(fused.apply, args), times(fused.restore, args)
                both = [draw + restore for draw, restore in zip(draws, restores)]
                name = f"{noise}, {scale}"
                moves = {f"draw, {name}": (3, draws), f"draw + restore, {name}": (5, both)}
                if noise == "uniform" and scale == "absolute":
                    moves["restore"] = (2, restores)
                for what, (moved, durations) in moves.items():
                    rate = summary(moved * elements * size / t / 1e6 for t in durations)
                    facts = {"elements": elements, "GB/s": rate, "÷ copy": rate["median"] / copy["median"]}
                    rows.append({"what": what, "dtype": str(dtype), **facts, "generator": perturbation.generator_kind})
        del model, source, target
    finish(args, ["what", "dtype", "elements", "GB/s", "÷ copy", "generator"], rows, __doc__ or "")


if __name__ == "__main__":
    main()
