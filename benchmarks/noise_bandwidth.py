"""Bytes per second of the fused kernels against a device-to-device copy, for the bytes that they must move.

To draw, back up and apply, each weight is read once, its backup and the weight written once: 12 bytes in fp32. To
restore: 8 bytes. A copy reads and writes: 8 bytes.
"""

from __future__ import annotations

from functools import partial

import torch
from record import arguments, finish, milliseconds, summary
from torch import nn

from smoothout import SmoothOut


def main() -> None:
    args = arguments(__doc__, millions=200, rounds=25)
    rows_of_matrix = args.millions * 1_000_000 // 4096 // 8
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.ParameterList(
            nn.Parameter(torch.randn(rows_of_matrix, 4096, dtype=dtype, device=args.device)) for _ in range(8)
        )
        elements, size = sum(p.numel() for p in model), model[0].element_size()
        source = torch.randn(elements, dtype=dtype, device=args.device)
        target = torch.empty_like(source)
        copies = [milliseconds(partial(target.copy_, source), args.device) for _ in range(args.rounds + 3)]
        copy = summary(2 * elements * size / t / 1e6 for t in copies[3:])
        rows.append({"what": "copy", "dtype": str(dtype), "elements": elements, "GB/s": copy, "÷ copy": 1.0})
        for noise in ("uniform", "gaussian", "rademacher"):
            for scale in ("absolute", "filter"):
                perturbation = SmoothOut(model, noise=noise, scale=scale)._perturbation
                draws, restores = [], []
                for step in range(args.rounds + 3):
                    draws.append(milliseconds(partial(perturbation.apply, 0.01, step), args.device))
                    restores.append(milliseconds(perturbation.restore, args.device))
                moves = {f"draw, {noise}, {scale}": (3, draws)}
                if noise == "uniform" and scale == "absolute":
                    moves["restore"] = (2, restores)
                for what, (moved, durations) in moves.items():
                    rate = summary(moved * elements * size / t / 1e6 for t in durations[3:])
                    facts = {"elements": elements, "GB/s": rate, "÷ copy": rate["median"] / copy["median"]}
                    rows.append({"what": what, "dtype": str(dtype), **facts, "generator": perturbation.generator_kind})
        del model, source, target
    finish(args, ["what", "dtype", "elements", "GB/s", "÷ copy", "generator"], rows, __doc__ or "")


if __name__ == "__main__":
    main()
