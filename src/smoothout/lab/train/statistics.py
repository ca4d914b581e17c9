"""BatchNorm's running statistics, measured anew over a whole epoch: those of training are of the last few passes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from smoothout import update_bn
from smoothout.lab.config import Config
from smoothout.lab.data import Batches
from smoothout.lab.methods import Method, Smoothed
from smoothout.lab.train.evaluate import noise_apart
from smoothout.lab.train.ghost_step import Batch, GhostStep
from smoothout.lab.train.processes import Processes

Passes = Iterable[tuple[Tensor, AbstractContextManager[Any]]]  # images, and what surrounds the pass that sees them


def has_statistics(model: nn.Module) -> bool:
    """Whether there are any to measure; layers that norm ghost by ghost have them too."""
    return any(isinstance(m, _BatchNorm) and m.track_running_stats for m in model.modules())


def at_clean_weights(batches: Iterable[tuple[Tensor, Tensor]]) -> Passes:
    """The weights as they are."""
    return ((images, nullcontext()) for images, labels in batches if len(labels) > 1)  # one image has no statistics


def as_in_training(
    model: nn.Module, config: Config, method: Method, update: GhostStep, batches: Batches, epoch: int
) -> Passes:
    """What an epoch's passes see: its images, cut and flipped, ghost by ghost, with new noise where training has it."""
    smooth, noisy_ghosts = None, 0
    if isinstance(method, Smoothed):
        smooth = noise_apart(config, model, method.strength, f"statistics/{config.seed}")
    for images, labels in batches.epoch(epoch, 0):
        ghosts = list(update.ghosts(Batch(images, labels, len(labels))))
        if isinstance(method, Smoothed):
            noisy_ghosts = method.noisy_ghosts(len(ghosts))
        for i, ghost in enumerate(ghosts):
            if len(ghost.labels) > 1:
                yield ghost.images, smooth.perturbed() if smooth and i < noisy_ghosts else nullcontext()


def measure_statistics(
    model: nn.Module, passes: Passes, precision: AbstractContextManager[Any], processes: Processes
) -> None:
    """Their means over these passes, of all processes; the weights and every random stream stay as they are."""
    device = next(model.parameters()).device

    def forward(model: nn.Module, one: tuple[Tensor, AbstractContextManager[Any]]) -> None:
        images, around = one
        with around:
            model(images)

    # Dropout's masks must not come from the stream of training, and must be the same each time at one place.
    with torch.random.fork_rng([device] if device.type == "cuda" else []), precision:
        update_bn(model, passes, forward)
    processes.average([b for b in model.buffers() if b.is_floating_point()])
