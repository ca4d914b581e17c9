"""Data-parallel training: what the processes that torchrun starts must tell one another.

Every process computes its part of each batch with weights `share = images / images of the whole batch`, so gradients
and losses of the processes simply add up, also where the last batch divides unevenly. All use the same optimizer on the
same sums, so their weights stay equal without being sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Processes:
    """The group that trains together; here one process, which has nothing to say to anybody."""

    rank, world_size = 0, 1

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Every gradient becomes the sum over the processes."""

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over the processes."""
        return values

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor becomes its mean over the processes."""

    def largest(self, number: int) -> int:
        """The largest of a small number over the processes."""
        return number

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in the order of their ranks; only the first process gets them."""
        return [value]

    def from_first(self, value: Any) -> Any:
        """What the first process has."""
        return value

    def close(self) -> None:
        """The group ends."""


ALONE = Processes()


class SeveralProcesses(Processes):
    """The processes of torchrun: NCCL between CUDA devices, gloo between CPUs."""

    def __init__(self, device: torch.device) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._device = device
        # gloo beside NCCL: flags and small objects travel without waiting for the GPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """In one message."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        self._dist.all_reduce(flat)
        parts = flat.split([g.numel() for g in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients)])

    def sum(self, values: Tensor) -> Tensor:
        total = values.clone()
        self._dist.all_reduce(total)
        return total

    def average(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._dist.all_reduce(tensor)
            tensor.div_(self.world_size)

    def largest(self, number: int) -> int:
        flag = torch.tensor(number)
        self._dist.all_reduce(flag, op=self._dist.ReduceOp.MAX)
        return int(flag)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        self._dist.gather_object(value, values)
        return values or []

    def from_first(self, value: Any) -> Any:
        values = [value]
        self._dist.broadcast_object_list(values)
        return values[0]

    def close(self) -> None:
        self._dist.destroy_process_group()


def started_by_torchrun() -> bool:
    """Whether this process is one of several."""
    return number_of_processes() > 1


def number_of_processes() -> int:
    """How many torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def speaks_for_all() -> bool:
    """Whether this is the one process whose words a person should see."""
    return os.environ.get("RANK", "0") == "0"


def join(device: torch.device) -> Processes:
    """The group this process belongs to."""
    return SeveralProcesses(device) if started_by_torchrun() else ALONE


def choose_device(name: str = "auto") -> torch.device:
    """The device of that name; `auto` is CUDA where there is one; under torchrun each process has its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise ValueError(device)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"device={name!r}: expected auto, cpu, cuda or cuda:1") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={name!r}: torch finds no CUDA device here")
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return device
