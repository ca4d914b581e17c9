"""A finished run, ready to be measured: its network with its weights, its images, its loss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smoothout.lab.data import Batches
from smoothout.lab.runs import Run, load_run
from smoothout.lab.train import build
from smoothout.lab.train.processes import choose_device

Batch = tuple[Tensor, Tensor]
SPLITS = ("train", "test")


@dataclass(frozen=True)
class Trained:
    """What every function of `smoothout.measure` asks for."""

    run: Run
    model: nn.Module
    train: Batches
    test: Batches
    which: Literal["last", "best"]

    def batches(self, split: Literal["train", "test"]) -> Batches:
        return self.train if split == "train" else self.test


def load_trained(
    path: str | Path,
    which: Literal["last", "best"] = "last",
    device: str = "auto",
    data_root: str | Path | None = None,
    batch_size: int | None = None,
    images: int | None = None,
) -> Trained:
    """The network of a run with the weights of its last (or best) epoch, in fp32, on a device.

    Args:
        batch_size: of the measuring: it changes no mean, only the time (and noise that is drawn anew for each batch).
        images: measure on the first so many of each split, in the files' order; by default on all.
    """
    run, on = load_run(path), choose_device(device)
    dataset = build.load_dataset(run.config, data_root)
    model = build.with_ghost_layers(build.build_model(run.config, dataset), run.config)
    model.load_state_dict(run.weights(which))
    if images is not None:
        whole = {split: getattr(dataset, split) for split in SPLITS}
        first = {name: split.take(torch.arange(min(images, len(split)))) for name, split in whole.items()}
        dataset = replace(dataset, **first)
    on_device = dataset.to(on)
    splits = {
        split: build.judging_batches(run.config, on_device, on, split=split, batch_size=batch_size) for split in SPLITS
    }
    return Trained(run, model.to(on), splits["train"], splits["test"], which)


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of a batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


@torch.no_grad()
def accuracy(model: nn.Module, batch: Batch) -> Tensor:
    """The fraction of a batch that is right."""
    return (model(batch[0]).argmax(1) == batch[1]).double().mean()
