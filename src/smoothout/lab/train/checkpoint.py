"""The resumable state of a run: plain tensors, numbers and text, so that it loads with `weights_only=True`."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smoothout.lab.files import RunError
from smoothout.lab.runs import CHECKPOINT, DAMAGED, PREVIOUS

FORMAT = 1


@dataclass(frozen=True)
class Position:
    """Where training is: so many steps into an epoch (from 0), and what it has cost so far."""

    epoch: int = 0
    step: int = 0
    updates: int = 0
    evaluations: float = 0.0
    seconds: float = 0.0  # of training in all
    epoch_seconds: float = 0.0  # of them, in the epoch that is going on


def private_state(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """What each process has of its own: random streams (dropout) and BatchNorm's running statistics."""
    state: dict[str, Any] = {
        "cpu_random": torch.get_rng_state(),
        "buffers": {name: buffer.detach().cpu().clone() for name, buffer in model.named_buffers()},
    }
    if device.type == "cuda":
        state["cuda_random"] = torch.cuda.get_rng_state(device)
    return state


@torch.no_grad()
def restore_private_state(state: dict[str, Any], model: nn.Module, device: torch.device) -> None:
    """Continue where `private_state` was taken."""
    torch.set_rng_state(state["cpu_random"])
    if device.type == "cuda" and "cuda_random" in state:
        torch.cuda.set_rng_state(state["cuda_random"], device)
    for name, buffer in model.named_buffers():
        buffer.copy_(state["buffers"][name])


def to_bytes(state: dict[str, Any]) -> bytes:
    """A checkpoint as it lies on disk. In memory first: then a full disk is an ordinary error of an ordinary write."""
    stream = io.BytesIO()
    torch.save({"format": FORMAT, **state}, stream)
    return stream.getvalue()  # no copy, and unlike a view of the stream it may outlive it


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the model's state on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Its state, with learning rates as numbers, wherever they are kept."""
    state = optimizer.state_dict()
    groups = [{**group, "lr": float(group["lr"])} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read, and a sentence to print if it is not the newest."""

    state: dict[str, Any]
    note: str


def read_newest(folder: Path, config_hash: str, world_size: int) -> Found | None:
    """The newest sound checkpoint of a folder; None if there is none yet.

    A newest one that is damaged is set aside and the one before it taken. If that is damaged too, or there is none, a
    RunError says so and everything stays as it is.
    """
    current, previous = folder / CHECKPOINT, folder / PREVIOUS
    problems = []
    for file in (current, previous):
        if not file.exists():
            continue
        try:
            state = _read(file)
        except RunError as error:
            problems.append(str(error))
            continue
        _check_belongs(file, state, config_hash, world_size)
        if not problems:
            return Found(state, "")
        current.replace(folder / DAMAGED)
        position = Position(**state["position"])
        going_on = f"going on from {previous.name}, epoch {position.epoch}, step {position.step}"
        return Found(state, f"{problems[0]}; it is kept as {DAMAGED}. {going_on}.")
    if problems:
        raise RunError(
            f"{'; '.join(problems)}. There is no sound checkpoint to go on from: choose another --out to begin anew, "
            f"or remove {CHECKPOINT}."
        )
    return None


def _read(file: Path) -> dict[str, Any]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch raises for a file cut short depends on where it was cut
        reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        raise RunError(f"{file}: damaged, {file.stat().st_size} bytes ({reason})") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise RunError(f"{file}: is no checkpoint of format {FORMAT}")
    return state


def _check_belongs(file: Path, state: dict[str, Any], config_hash: str, world_size: int) -> None:
    if state["config_hash"] != config_hash:
        raise RunError(f"{file}: is of configuration {state['config_hash']}, this run is {config_hash}")
    if state["world_size"] != world_size:
        raise RunError(
            f"{file}: was written by {state['world_size']} processes, here are {world_size}: go on with as many"
        )
