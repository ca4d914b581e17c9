"""One update by a loop over ghost batches: their gradients add up to that of the batch's mean loss.

A batch is cut as `models.ghost_norm` says (the authors' rule). Each ghost weighs by its images, so a smaller last one
counts for what it is. BatchNorm normalises every ghost by its own statistics, and its running statistics move once a
ghost, at the weights which that ghost saw: with noise, the noisy ones, as in the paper; evaluation uses them with clean
weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from smoothout.lab.models import ghost_sizes
from smoothout.lab.train.processes import ALONE, Processes

AMP_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, eq=False)
class Batch:
    """This process's part of a batch, on the device.

    Args:
        total: images of all processes together.
    """

    images: Tensor
    labels: Tensor
    total: int


class Seen(NamedTuple):
    """What backward passes saw, on the device: their share of the batch's mean loss, and how many images were right."""

    loss: Tensor
    correct: Tensor


def add_up(passes: Iterable[Seen]) -> Seen:
    """The sums over passes."""
    first, *others = passes
    loss, correct = first
    for each in others:
        loss, correct = loss + each.loss, correct + each.correct
    return Seen(loss, correct)


class GhostStep:
    """Gradients of ghost batches, and the update they add up to.

    Args:
        model: as it is called; possibly compiled.
        chunks: into how many ghosts a full batch of this process is cut.
        amp: `"none"`, `"bf16"` or `"fp16"`, the last with a gradient scaler.
        clip: largest norm of the gradient; 0 does not clip.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        chunks: int = 1,
        amp: str = "none",
        clip: float = 0.0,
        processes: Processes = ALONE,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.chunks, self.clip = chunks, clip
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.processes = processes
        self.half = AMP_TYPES.get(amp)
        self._device_type = self.parameters[0].device.type
        self.scaler = torch.amp.GradScaler(self._device_type, enabled=amp == "fp16")

    def precision(self) -> AbstractContextManager:
        """Autocast, where mixed precision was asked for."""
        if self.half is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self.half)

    def ghosts(self, batch: Batch) -> list[Batch]:
        """The parts of a batch; the batch itself where it is not cut."""
        if self.chunks == 1:
            return [batch]
        sizes = ghost_sizes(len(batch.labels), self.chunks)
        parts = zip(batch.images.split(sizes), batch.labels.split(sizes))
        return [Batch(images, labels, batch.total) for images, labels in parts]

    def backward(self, ghost: Batch, weight: float = 1.0) -> Seen:
        """Add the gradient of a ghost's share of the batch's mean loss, times `weight`, to the gradients."""
        with self.precision():
            outputs = self.model(ghost.images)
        share = weight * len(ghost.labels) / ghost.total
        loss = F.cross_entropy(outputs.float(), ghost.labels)
        if share != 1.0:
            loss = loss * share
        self.scaler.scale(loss).backward()
        with torch.no_grad():
            correct = (outputs.argmax(1) == ghost.labels).sum()
        return Seen(loss.detach(), correct)

    def update(self) -> None:
        """Sum over processes, unscale, clip, step, forget the gradients."""
        self._apply()
        self.optimizer.zero_grad(set_to_none=True)

    def _apply(self) -> None:
        self.processes.sum_gradients(self.parameters)
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
