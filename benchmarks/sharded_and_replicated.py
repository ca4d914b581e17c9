"""Replicated (DDP) and sharded (FSDP2) training beside one process: what is equal bit for bit, and what is not.

python benchmarks/sharded_and_replicated.py [--check PAGE] [--out RECORD]

Starts two gloo processes. One process trains on the joined batch, two on half of it each; the same seed everywhere.
Prints a table in Markdown; with --check it must stand on that page, word for word.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from record import finish
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from smoothout import AdaSmoothOut, SmoothOut

WORLD, STEPS, STRENGTH = 2, 10, 0.1
METHODS = {"SmoothOut": SmoothOut, "AdaSmoothOut": AdaSmoothOut}
BITS, ROUNDING, OTHER = "bit for bit", "to rounding", "differs"
SPANS = 2  # the parameter whose filters span ranks under FSDP2: the weight of the transposed convolution


def network() -> nn.Module:
    """17 rows do not divide by 2. The filters of the transposed convolution span ranks when it is sharded by rows."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 17),
        nn.Tanh(),
        nn.Unflatten(1, (17, 1)),
        nn.ConvTranspose1d(17, 6, 4),
        nn.Flatten(),
        nn.LayerNorm(24),
        nn.Linear(24, 5),
    )


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def sharded(model: nn.Module) -> nn.Module:
    for layer in [m for m in model if any(True for _ in m.parameters())]:
        fully_shard(layer)
    return fully_shard(model)


# name: (how the model is wrapped, what SmoothOut is given)
SETUPS: dict[str, tuple[Callable[[nn.Module], nn.Module], dict[str, Any]]] = {
    "one process": (as_it_is, {"shared_noise": True}),  # in a group every process has a rank: shared is rank-free
    "DDP": (DistributedDataParallel, {}),
    "DDP, shared_noise": (DistributedDataParallel, {"shared_noise": True}),
    "FSDP2": (sharded, {}),
}


def batches() -> list[tuple[Tensor, Tensor]]:
    numbers = torch.randn(STEPS, 16, 17, generator=torch.Generator().manual_seed(1))
    return [(batch[:, :12], batch[:, 12:]) for batch in numbers]


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def local(tensor: Any) -> Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


def weights(model: nn.Module, part: Callable[[Any], Tensor]) -> list[Tensor]:
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return [part(p) for p in model.parameters()]


def train(setup: str, method: str, rank: int) -> dict[str, Any]:
    """Weights with the first draw on them, weights at the end, and whether each restore gave back every bit."""
    wrap, options = SETUPS[setup]
    model = wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    smooth = METHODS[method](model, STRENGTH, **options)
    found: dict[str, Any] = {"restored": True}
    for x, y in batches():
        mine = slice(None) if setup == "one process" else slice(8 * rank, 8 * rank + 8)
        before = weights(model, local)
        with smooth.perturbed():
            if "noisy" not in found:
                found["noisy"] = weights(model, whole)
            (model(x[mine]) - y[mine]).square().mean().backward()
        found["restored"] &= all(map(torch.equal, weights(model, local), before))
        optimizer.step()
        optimizer.zero_grad()
    found["end"] = weights(model, whole)
    found["state"] = smooth.state_dict()
    return found


def compare(ours: list[Tensor], theirs: list[Tensor]) -> tuple[str, float]:
    """A verdict, and the largest difference over the largest weight."""
    apart = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    apart /= max(float(t.abs().max()) for t in theirs)
    if all(map(torch.equal, ours, theirs)):
        return BITS, 0.0
    return (ROUNDING if apart < 1e-5 else OTHER), apart


def without(tensors: list[Tensor]) -> list[Tensor]:
    return tensors[:SPANS] + tensors[SPANS + 1 :]


def on_all_ranks(tensors: list[Tensor]) -> list[list[Tensor]]:
    result = []
    for tensor in tensors:
        copies = [torch.empty_like(tensor) for _ in range(WORLD)]
        dist.all_gather(copies, tensor.contiguous())
        result.append(copies)
    return [[copies[rank] for copies in result] for rank in range(WORLD)]


def rows_of(setup: str, method: str, rank: int, alone: dict[str, Any]) -> dict[str, Any]:
    ours, again = train(setup, method, rank), train(setup, method, rank)
    first, second = on_all_ranks(ours["noisy"])
    ends = on_all_ranks(ours["end"])
    restored = torch.tensor(int(ours["restored"]))
    dist.all_reduce(restored, dist.ReduceOp.MIN)
    checks = {
        "weights after a restore, with those before": (BITS if restored else OTHER, 0.0),
        "θ of the ranks, with each other": compare(second, first),
        "θ of rank 0, with one process": compare(without(first), without(alone["noisy"])),
        "the same, filters that span ranks": compare(first[SPANS : SPANS + 1], alone["noisy"][SPANS : SPANS + 1]),
        "trained weights of the ranks, with each other": compare(ends[1], ends[0]),
        "trained weights, with one process": compare(ends[0], alone["end"]),
        "trained weights, with the same run again": compare(ours["end"], again["end"]),
        "`state_dict()` of SmoothOut, with one process": (BITS if ours["state"] == alone["state"] else OTHER, 0.0),
    }
    return {"setup": setup, "method": method, **{name: list(check) for name, check in checks.items()}}


def serve(rank: int, port: int, answer: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    rows = []
    for method in METHODS:
        alone = train("one process", method, rank)
        rows += [rows_of(setup, method, rank, alone) for setup in list(SETUPS)[1:]]
    if rank == 0:
        answer.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def as_markdown(rows: list[dict[str, Any]]) -> str:
    setups = list(SETUPS)[1:]
    checks = [name for name in rows[0] if name not in ("setup", "method")]
    lines = ["| equal are | " + " | ".join(f"{s}" for s in setups) + " |", "|---" * (len(setups) + 1) + "|"]
    for check in checks:
        cells = []
        for setup in setups:
            found = {row["method"]: row[check][0] for row in rows if row["setup"] == setup}
            one = len(set(found.values())) == 1
            cells.append(found["SmoothOut"] if one else "; ".join(f"{name}: {said}" for name, said in found.items()))
        lines.append(f"| {check} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=Path, help="a page that must show this table")
    parser.add_argument("--out", type=Path, help="write a JSON record here")
    args = parser.parse_args()
    args.device = "cpu"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "rows.json"
        mp.spawn(serve, (port, answer), nprocs=WORLD)
        rows = json.loads(answer.read_text())
    if args.out is not None:
        notes = f"{STEPS} steps, fp32, two gloo processes; [verdict, largest difference over the largest weight]"
        finish(args, ["setup", "method"], rows, notes)
    table = as_markdown(rows)
    print(table)
    if args.check is not None and table not in args.check.read_text(encoding="utf-8"):
        raise SystemExit(f"{args.check} shows another table: put the one above on it")


if __name__ == "__main__":
    main()
