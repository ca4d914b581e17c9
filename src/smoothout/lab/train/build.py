"""From a configuration to the things it names: dataset, model, optimizer, batches."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import SGD, Adam, AdamW, Optimizer

from smoothout.lab import models
from smoothout.lab.config import Config, ConfigError
from smoothout.lab.data import AUGMENTATIONS, Batches, Dataset, hold_out, load
from smoothout.lab.data.augment import BoxAugmentation
from smoothout.lab.data.dataset import Split
from smoothout.lab.models import chunk_count, with_ghost_norm
from smoothout.lab.train.processes import ALONE, Processes
from smoothout.lab.train.regime import scaled_rate

EVALUATION_BATCH = 1000
TEST_BATCH_ON_CUDA = 10_000  # in training, of images in memory: for fewer the device waits for the host's launches


def load_dataset(config: Config, root: str | Path | None = None) -> Dataset:
    """The dataset of a run; with `hold_out` its test split is cut off the training images, the same for every seed."""
    dataset = load(config.dataset, root)
    return hold_out(dataset, config.hold_out) if config.hold_out else dataset


def build_model(config: Config, dataset: Dataset) -> nn.Module:
    """The network of a run, initialised from torch's global random stream, on the CPU."""
    constructor = models.MODELS.get(config.model)
    arguments = {}
    takes_dropout = constructor is not None and "dropout" in inspect.signature(constructor).parameters
    if config.dropout is not None and takes_dropout:
        arguments["dropout"] = config.dropout
    model = models.build(config.model, classes=dataset.classes, input_shape=dataset.image_shape, **arguments)
    if config.dropout is not None and not takes_dropout:
        _set_dropout(model, config)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # pyrefly: ignore[no-matching-overload]
    return model


def _set_dropout(model: nn.Module, config: Config) -> None:
    layers = [module for module in model.modules() if isinstance(module, _DropoutNd)]
    if not layers:
        raise ConfigError(f"dropout={config.dropout}: {config.model} has no dropout")
    for layer in layers:
        layer.p = config.dropout or 0.0


def ghost_batches(config: Config, world_size: int = 1) -> int:
    """Into how many ghosts each process cuts its part of a full batch."""
    if not config.ghost_batch_size:
        return 1
    return chunk_count(max(1, config.batch_size // world_size), config.ghost_batch_size)


def with_ghost_layers(model: nn.Module, config: Config, world_size: int = 1) -> nn.Module:
    """The model with ghost batch normalisation in its layers, where that is how ghosts are made."""
    if config.ghost_batch_size and config.ghost_by == "layer":
        return with_ghost_norm(model, chunks=ghost_batches(config, world_size))
    return model


def make_optimizer(config: Config, model: nn.Module) -> Optimizer:
    """The optimizer of a run, one fused kernel a step where the device has it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(f"model={config.model!r}: it has no trainable parameter (requires_grad is False in all)")
    fused = parameters[0].device.type == "cuda" or None
    rate, decay = scaled_rate(config), config.weight_decay
    if config.optimizer == "sgd":
        return SGD(parameters, lr=rate, momentum=config.momentum, weight_decay=decay, fused=fused)
    return {"adam": Adam, "adamw": AdamW}[config.optimizer](parameters, lr=rate, weight_decay=decay, fused=fused)


def training_batches(
    config: Config,
    dataset: Dataset,
    device: torch.device,
    processes: Processes = ALONE,
    workers: int | None = None,
) -> Batches:
    """Shuffled batches of the training split.

    A short last batch is trained on, weighed as it is. One of fewer than two images a process is left out, since
    BatchNorm has no statistics of one.
    """
    rest = len(dataset.train) % config.batch_size
    augment = _augmentation(config, dataset)
    _check_size(augment, dataset)
    return Batches(
        dataset.train,
        min(config.batch_size, len(dataset.train)),
        device=device,
        shuffle=True,
        seed=config.seed,
        augment=augment,
        rank=processes.rank,
        world_size=processes.world_size,
        drop_last=0 < rest < 2 * processes.world_size and len(dataset.train) > config.batch_size,
        channels_last=config.channels_last,
        workers=workers,
    )


def _augmentation(config: Config, dataset: Dataset) -> str:
    """The augmentation in training; images of several sizes must be cut to one in any case."""
    return dataset.evaluate if config.augment == "none" else config.augment


def _check_size(augment: str, dataset: Dataset) -> None:
    """Refuse to train on images of another size than is judged: a regime's augmentation may be for other data."""
    if not isinstance(dataset.train, Split):
        return  # files can only be cut, and Batches sees to that
    judged, as_they_are = tuple(dataset.image_shape[1:]), tuple(dataset.train.images.shape[-2:])
    made = {
        name: (how.size, how.size) if isinstance(how, BoxAugmentation) else as_they_are
        for name, how in AUGMENTATIONS.items()
    }
    if made[augment] != judged:
        fitting = " or ".join(name for name, size in made.items() if size == judged)
        raise ConfigError(
            f"augment={augment!r}: it makes training images of {made[augment][0]} × {made[augment][1]}, while "
            f"{dataset.name} is judged at {judged[0]} × {judged[1]}: choose --augment {fitting}"
        )


def test_batch_size(dataset: Dataset, device: torch.device) -> int:
    """How many images are judged at once after an epoch."""
    return TEST_BATCH_ON_CUDA if device.type == "cuda" and isinstance(dataset.test, Split) else EVALUATION_BATCH


def judging_batches(
    config: Config,
    dataset: Dataset,
    device: torch.device,
    processes: Processes = ALONE,
    split: str = "test",
    workers: int | None = None,
    batch_size: int | None = None,
    shuffle: bool = False,
    augmented: bool = False,
) -> Batches:
    """The images of a split in the files' order, or in one that is always the same; as they are, or as in training."""
    images = dataset.train if split == "train" else dataset.test
    size = min(batch_size or EVALUATION_BATCH, len(images))
    while 0 < len(images) % size < processes.world_size:  # every process must have a part of the last batch
        size += 1
    return Batches(
        images,
        size,
        device=device,
        augment=_augmentation(config, dataset) if augmented else dataset.evaluate,
        shuffle=shuffle,
        rank=processes.rank,
        world_size=processes.world_size,
        channels_last=config.channels_last,
        workers=workers,
    )
