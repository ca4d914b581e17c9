"""Loss and accuracy over a split: in evaluation mode, at clean weights unless noise is asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smoothout.lab.config import Config
from smoothout.lab.methods import smoothing
from smoothout.lab.models.folded import FoldedResNet
from smoothout.lab.models.resnet import ResNet
from smoothout.lab.train.ghost_step import AMP_TYPES
from smoothout.lab.train.processes import ALONE, Processes
from smoothout.lab.train.stacked import why_no_stack


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and fraction right."""

    loss: float
    accuracy: float


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    precision: AbstractContextManager[Any] | None = None,
    processes: Processes = ALONE,
    noise: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Evaluation:
    """Mean over all images of all processes; the device is waited for once, at the end.

    Args:
        precision: autocast, to judge in the precision of training.
        noise: called for each batch, a context in which the batch is evaluated.
    """
    return in_numbers(evaluated(model, batches, precision=precision, noise=noise), processes)


def in_numbers(sums: Tensor, processes: Processes = ALONE) -> Evaluation:
    """The means behind the sums that `evaluated` gave; waits for the device."""
    loss, right, images = processes.sum(sums).tolist()
    return Evaluation(loss / images, right / images)


@torch.no_grad()
def evaluated(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    precision: AbstractContextManager[Any] | None = None,
    noise: Callable[[], AbstractContextManager[Any]] = nullcontext,
    network: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Sums of losses, of right answers and of images of this process, on the device, which may still be at it.

    Args:
        network: what computes in the model's place.
    """
    sums: Tensor | None = None
    was_training = model.training
    model.eval()
    try:
        for images, labels in batches:
            with noise(), nullcontext() if precision is None else precision:
                outputs = (network or model)(images)
            loss = F.cross_entropy(outputs.float(), labels, reduction="sum").double()
            right = (outputs.argmax(1) == labels).sum().double()
            count = torch.full_like(right, len(labels))
            part = torch.stack([loss, right, count])
            sums = part if sums is None else sums + part
    finally:
        model.train(was_training)
    if sums is None:
        raise ValueError("there are no images to evaluate")
    return sums


def quick_network(config: Config, model: nn.Module) -> FoldedResNet | None:
    """A faster stand-in for the model in evaluation mode, equal but for rounding; None where there is none."""
    on_cuda = all(p.is_cuda for p in model.parameters())
    if not on_cuda or config.amp not in AMP_TYPES or not config.channels_last or config.compile or why_no_stack(model):
        return None
    return FoldedResNet(cast(ResNet, model), AMP_TYPES[config.amp])


def smoothed_loss(
    config: Config,
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    strength: float,
    epoch: int,
    precision: AbstractContextManager[Any] | None = None,
    processes: Processes = ALONE,
) -> float:
    """C̄(w; a): the mean loss with new noise for every batch, from a stream that training never sees."""
    key = hashlib.blake2b(f"smoothed loss/{config.seed}/{epoch}".encode(), digest_size=7).digest()
    unscheduled = replace(
        config,
        strength=strength,
        seed=int.from_bytes(key),
        strength_schedule="constant",
        strength_warmup=0.0,
        denoise=True,
    )
    smooth = smoothing(unscheduled, model, steps=1, steps_per_epoch=1)
    return evaluate(model, batches, precision=precision, processes=processes, noise=smooth.perturbed).loss
