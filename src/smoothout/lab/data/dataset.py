"""What a dataset is: two splits of images and labels, and how they are to be normalised."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, eq=False)
class Split:
    """Images of one size in memory, on any device.

    Args:
        images: uint8, N×C×H×W.
        labels: int64, N.
        mean, std: per channel, on the scale where a pixel of 255 is 1.
    """

    images: Tensor
    labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor) -> Split:
        """The images and labels of these rows, in this order."""
        rows = rows.to(self.labels.device)
        return replace(self, images=self.images[rows], labels=self.labels[rows])

    def to(self, device: torch.device | str) -> Split:
        """The same split on `device`; no copy where it is there already."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))


@dataclass(frozen=True, eq=False)
class FolderSplit:
    """Image files of any sizes, decoded batch by batch in worker processes. Labels stay on the CPU."""

    files: tuple[str, ...]
    labels: Tensor
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __len__(self) -> int:
        return len(self.files)

    def take(self, rows: Tensor) -> FolderSplit:
        """The files and labels of these rows, in this order."""
        return replace(self, files=tuple(self.files[row] for row in rows.tolist()), labels=self.labels[rows])

    def to(self, device: torch.device | str) -> FolderSplit:
        """Itself: files do not move."""
        return self


AnySplit = Split | FolderSplit


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test split with all that a model or a loader must know of them.

    Args:
        image_shape: C×H×W as the model gets it, so after cropping for image folders.
        evaluate: the augmentation that images are judged with: a deterministic one.
        test_origin: what the test split is, for the record: "test", or which training images stand in its place.
    """

    name: str
    train: AnySplit
    test: AnySplit
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    evaluate: str = "none"
    test_origin: str = "test"

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    def to(self, device: torch.device | str) -> Dataset:
        """The same dataset with its in-memory splits on `device`, so that several loaders share one copy there."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def hold_out(dataset: Dataset, n: int, seed: int = 0) -> Dataset:
    """Put n training images in the test split's place: hyperparameters are chosen on them, never on the test set.

    Classes keep their shares to within one image. The same (n, seed) gives the same images, in the files' order.
    """
    total = len(dataset.train)
    if not 0 < n < total:
        raise ValueError(f"hold_out: n={n}, but {dataset.name} has {total} training images: 0 < n < {total} is needed")
    labels = dataset.train.labels.cpu()
    shuffled = torch.randperm(total, generator=generator_for("hold out", seed))
    # An image's rank within its class, as a fraction of the class: the n smallest take the same share of every class.
    fraction = torch.empty(total, dtype=torch.float64)
    for label in range(dataset.classes):
        members = shuffled[labels[shuffled] == label]
        fraction[members] = (torch.arange(len(members), dtype=torch.float64) + 0.5) / max(len(members), 1)
    chosen = shuffled[torch.argsort(fraction[shuffled], stable=True)[:n]]
    is_held = torch.zeros(total, dtype=torch.bool)
    is_held[chosen] = True
    return replace(
        dataset,
        train=dataset.train.take(torch.nonzero(~is_held).flatten()),
        test=dataset.train.take(torch.nonzero(is_held).flatten()),
        test_origin=f"{n} of train, seed {seed}",
    )


def generator_for(purpose: str, *key: int) -> torch.Generator:
    """A CPU generator that is a pure function of its purpose and key, and shares no stream with any other."""
    text = "/".join([purpose, *map(str, key)])
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    # The sign bit is dropped since manual_seed takes a signed number.
    return torch.Generator().manual_seed(seed >> 1)
