"""A finished run, ready to be measured: its network with its weights, its images, its loss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smoothout.lab.config import Config
from smoothout.lab.data import Batches, Dataset
from smoothout.lab.data.dataset import Split
from smoothout.lab.files import RunError
from smoothout.lab.presets import TABLE_1_MODELS
from smoothout.lab.runs import Run, load_run
from smoothout.lab.train import build
from smoothout.lab.train.processes import choose_device

Batch = tuple[Tensor, Tensor]
# On CUDA, where a thousand images are done before the next are launched.
LARGER_BATCHES = dict.fromkeys(TABLE_1_MODELS, 5000) | {"resnet44": 2500}


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

    def held(self, split: Literal["train", "test"]) -> Batches | list[Batch]:
        """The batches for many passes: on CUDA made once and kept, where their images are in memory anyway."""
        batches = self.batches(split)
        keep = batches.device.type == "cuda" and isinstance(batches.split, Split)
        return list(batches) if keep else batches


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
            By default 1,000; on CUDA 5,000 of the paper's small networks, 2,500 of ResNet44.
        images: measure on the first so many of each split, in the files' order; by default on all.
    """
    run, on = load_run(path), choose_device(device)
    dataset = _dataset(run.config.dataset, run.config.hold_out, data_root)
    if batch_size is None and on.type == "cuda":
        batch_size = LARGER_BATCHES.get(run.config.model)
    model = build.with_ghost_layers(build.build_model(run.config, dataset), run.config)
    weights = run.weights(which)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(f"{path}: its weights are not those of its network, {run.config.model} ({error})") from error
    if images is not None:
        train, test = (split.take(torch.arange(min(images, len(split)))) for split in (dataset.train, dataset.test))
        dataset = replace(dataset, train=train, test=test)
    dataset = dataset.to(on)
    train, test = (
        build.judging_batches(run.config, dataset, on, split=split, batch_size=batch_size)
        for split in ("train", "test")
    )
    return Trained(run, model.to(on), train, test, which)


@lru_cache(maxsize=1)  # many runs of one data set are measured one after another
def _dataset(name: str, hold_out: int, root: str | Path | None) -> Dataset:
    return build.load_dataset(Config(dataset=name, hold_out=hold_out), root)


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of a batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


class OnePass:
    """Loss and accuracy of one forward pass: measurements ask for both, the accuracy directly after the loss."""

    def __init__(self) -> None:
        self._kept: tuple[Batch, Tensor] | None = None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of a batch, as `mean_loss`."""
        outputs = model(batch[0])
        self._kept = batch, outputs.detach()
        return F.cross_entropy(outputs, batch[1])

    @torch.no_grad()
    def accuracy(self, model: nn.Module, batch: Batch) -> Tensor:
        """The fraction of a batch that is right."""
        kept, self._kept = self._kept, None  # once: asked again, the weights may be others
        outputs = kept[1] if kept is not None and kept[0] is batch else model(batch[0])
        return (outputs.argmax(1) == batch[1]).double().mean()
