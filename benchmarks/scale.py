"""What noise costs one rank, as parameters and ranks grow: measured to two processes, computed to a thousand.

OMP_NUM_THREADS=1 python benchmarks/scale.py --device cpu --out benchmarks/results/scale-cpu-1-thread.json
python benchmarks/scale.py --check docs/scale.md        measures nothing: are the page's tables those of the record?
"""

from __future__ import annotations

import gc
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from record import arguments, finish, summary
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from smoothout import SmoothOut
from smoothout.blocks import cut_into_blocks
from smoothout.filters import FilterLayout
from smoothout.sharding import Shard

RECORD = Path(__file__).parent / "results" / "scale-cpu-1-thread.json"
ON_H200 = RECORD.with_name("scaling-cuda.json")


# ---- measured --------------------------------------------------------------------------------------------------------


class Conv1D(nn.Module):
    """Stores (inputs, outputs), as GPT-2's: a filter is a column, and sharding by rows cuts it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))


def build(setup: str, parameters: int) -> nn.Module:
    width = 500 if parameters <= 10**6 else 1000  # smaller and larger than a block of 2¹⁸ elements
    layers = range(parameters // width**2)
    spans = "span" in setup
    model = nn.Sequential(*(Conv1D(width) if spans else nn.Linear(width, width, bias=False) for _ in layers))
    return fully_shard(model) if setup.startswith("FSDP2") else model


SETUPS = ["one process", "DDP", "FSDP2", "FSDP2, filters span"]


def measure(parameters: int, scale: str, rounds: int) -> list[dict[str, Any]]:
    """Draw and restore on this rank, one of each setup per round: a slow moment of the machine hits all alike."""
    torch.manual_seed(0)
    drawing = {setup: SmoothOut(build(setup, parameters), scale=scale)._perturbation for setup in SETUPS}
    times: dict[str, dict[str, list[float]]] = {setup: {"wall": [], "processor": []} for setup in SETUPS}
    reduced: dict[str, list[int]] = {}
    for turn in range(rounds + 1):
        for setup, p in drawing.items():
            dist.barrier()
            if setup == "one process" and dist.get_rank() != 0:
                continue  # it waits at the next barrier: rank 0 works alone
            with counting_reduced_bytes() as reduced[setup]:
                wall, processor = time.perf_counter(), time.process_time()
                p.apply(0.01, turn)
                p.restore()
                if turn:  # the first one warms up
                    times[setup]["processor"].append(1e3 * (time.process_time() - processor))
                    times[setup]["wall"].append(1e3 * (time.perf_counter() - wall))
    if dist.get_rank() != 0:
        return []
    alone = times["one process"]["processor"]
    return [
        {
            "kind": "measured",
            "setup": setup,
            "scale": scale,
            "parameters": parameters,
            "parameters on a rank": sum(w.numel() for w in p._weights),
            "elements drawn": sum(block.elements for block in p._blocks),
            "processor ms": summary(times[setup]["processor"]),
            "over one process": summary(t / one for t, one in zip(times[setup]["processor"], alone, strict=True)),
            "wall ms": summary(times[setup]["wall"]),
            "bytes held": sum(t.nbytes for t in [*p._backups, *p._foreach.scratch.values()]),
            "all-reduces": len(reduced[setup]),
            "bytes reduced": sum(reduced[setup]),
        }
        for setup, p in drawing.items()
    ]


@contextmanager
def counting_reduced_bytes() -> Iterator[list[int]]:
    sizes: list[int] = []
    all_reduce = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        yield sizes
    finally:
        dist.all_reduce = all_reduce


def serve(rank: int, port: int, largest: int, rounds: int, answer: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    rows = []
    for scale in ("absolute", "filter"):
        for power in range(6, largest + 1):
            rows += measure(10**power, scale, rounds)
            gc.collect()
    if rank == 0:
        answer.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def in_two_processes(largest: int, rounds: int) -> list[dict[str, Any]]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "rows.json"
        mp.spawn(serve, (port, largest, rounds, answer), nprocs=2)
        return json.loads(answer.read_text())


# ---- computed --------------------------------------------------------------------------------------------------------


@cache
def h200(scale: str) -> dict[str, float]:
    """Fused kernels on one H200, fp32, by the record: device time a parameter, the host's at all and a tensor."""
    rows = [row for row in json.loads(ON_H200.read_text())["rows"] if row["scale"] == scale]

    def called(parameters: int, tensors: int) -> float:
        same = [r for r in rows if (r["parameters"], r["tensors"]) == (parameters, tensors)]
        return statistics.median(r["called ms"]["median"] for r in same)

    largest = max(rows, key=lambda row: row["parameters"])
    return {
        "device_ns": 1e6 * largest["device ms"]["median"] / largest["parameters"],
        "host_ms": statistics.median(called(10**power, 10) for power in (4, 5, 6)),
        "host_ms_per_tensor": (called(10**7, 1000) - called(10**7, 10)) / 990,
    }


RANKS = (1, 8, 64, 1000)
# Decoders with gated feed-forward layers: (layers, width, of keys and values, of the feed-forward layer). 32,000 words.
DECODERS = {"1 B": (16, 2048, 2048, 8192), "7 B": (32, 4096, 4096, 11008), "70 B": (80, 8192, 1024, 28672)}


def shapes(name: str) -> Iterator[tuple[int, int]]:
    """Of all matrices, as torch stores them: (outputs, inputs)."""
    layers, width, keys, inner = DECODERS[name]
    yield (32_000, width)
    for _ in range(layers):
        yield from ((width, width), (keys, width), (keys, width), (width, width))
        yield from ((inner, width), (inner, width), (width, inner))
    yield (32_000, width)


def drawn_blockwise(matrices: list[tuple[int, int]], ranks: int, rank: int) -> int:
    """Raw values that one rank draws without the fused kernels: every block of 2²⁴ it holds a part of, whole."""
    whole = [torch.empty(shape, device="meta") for shape in matrices]
    shards = []
    for tensor in whole:
        rows = -(-tensor.shape[0] // ranks)  # as FSDP2 cuts: the last ranks may have fewer, or none
        start = min(rank * rows, tensor.shape[0])
        shards.append(Shard(tensor[start : start + rows], (start, 0)))
    blocks = cut_into_blocks(whole, shards, [FilterLayout(0)] * len(whole), [0] * len(whole), may_share=True)
    return sum(block.elements for block in blocks)


def computed(name: str, ranks: int) -> dict[str, Any]:
    matrices = list(shapes(name))
    parameters = sum(rows * columns for rows, columns in matrices)
    here = sum(min(-(-rows // ranks), rows) * columns for rows, columns in matrices)  # the first rank has the most
    row = {
        "kind": "computed",
        "model": name,
        "parameters": parameters,
        "ranks": ranks,
        "parameters on a rank": here,
        "backup GB": 4e-9 * here,
        "drawn blockwise": drawn_blockwise(matrices, ranks, rank=0),
    }
    for scale in ("absolute", "filter"):
        cost = h200(scale)
        host = cost["host_ms"] + cost["host_ms_per_tensor"] * len(matrices)
        row[f"{scale} ms"] = 1e-6 * cost["device_ns"] * here + host
    return row


# ---- the page --------------------------------------------------------------------------------------------------------


def millions(n: float) -> str:
    return f"{n / 1e6:,.0f} M" if n >= 1e6 else f"{n / 1e3:,.0f} k"


def milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.2g} ms"


def pairs(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Measured rows of SmoothOut, each with AdaSmoothOut's."""
    measured = [row for row in rows if row["kind"] == "measured"]
    for a in measured:
        for f in measured:
            same = all(a[key] == f[key] for key in ("setup", "parameters"))
            if same and (a["scale"], f["scale"]) == ("absolute", "filter"):
                yield a, f


def times_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| | parameters | SmoothOut | ÷ one process | AdaSmoothOut | ÷ one process |", "|---|---|---|---|---|---|"]
    for a, f in pairs(rows):
        cells = [a["setup"], millions(a["parameters"])]
        for row in (a, f):
            ms, ratio = row["processor ms"], row["over one process"]
            cells.append(f"{ms['median']:.1f} ({ms['low']:.1f} to {ms['high']:.1f})")
            alone = row["setup"] == "one process"
            cells.append("" if alone else f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def sizes_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| | parameters | on a rank | drawn | memory held | AdaSmoothOut reduces |", "|---|---|---|---|---|---|"]
    for a, f in pairs(rows):
        reduces = f"{f['bytes reduced'] / 1e3:,.0f} kB in {f['all-reduces']}" if f["all-reduces"] else "nothing"
        lines.append(
            f"| {a['setup']} | {millions(a['parameters'])} | {millions(a['parameters on a rank'])} | "
            f"{millions(a['elements drawn'])} | "
            f"{a['bytes held'] / 1e6:.0f} MB | {reduces} |"
        )
    return "\n".join(lines)


def computed_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | ranks | parameters on a rank | backup | SmoothOut, fused | AdaSmoothOut, fused | drawn blockwise |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        if r["kind"] == "computed":
            over = r["drawn blockwise"] / r["parameters on a rank"]
            backup = f"{r['backup GB']:.1f} GB" if r["backup GB"] >= 1 else f"{1e3 * r['backup GB']:.0f} MB"
            lines.append(
                f"| {r['model']} | {r['ranks']:,} | {millions(r['parameters on a rank'])} | {backup} | "
                f"{milliseconds(r['absolute ms'])} | {milliseconds(r['filter ms'])} | {over:,.1f} × |"
            )
    return "\n".join(lines)


def main() -> None:
    args = arguments(__doc__, rounds=15, largest=8, check="")
    if args.check:
        rows = json.loads(RECORD.read_text())["rows"]
        fresh = [computed(name, ranks) for name in DECODERS for ranks in RANKS]
        for table in (times_table(rows), sizes_table(rows), computed_table(fresh)):
            print(f"{table}\n")
            if table not in Path(args.check).read_text(encoding="utf-8"):
                raise SystemExit(f"{args.check} shows another table: put the one above on it")
        return
    torch.set_num_threads(1)
    rows = in_two_processes(args.largest, args.rounds)
    rows += [computed(name, ranks) for name in DECODERS for ranks in RANKS]
    columns = [
        "setup",
        "scale",
        "parameters",
        "parameters on a rank",
        "elements drawn",
        "processor ms",
        "over one process",
    ]
    notes = "rank 0 of two gloo processes, setups in turns; rows of kind 'computed' are arithmetic, see scale.py"
    finish(args, columns, rows, notes)


if __name__ == "__main__":
    main()
