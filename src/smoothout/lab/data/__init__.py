"""Datasets: readers, fetching with checksums, batches on the training device."""

from .augment import (
    AUGMENTATIONS,
    Augmentation,
    CentreCrop,
    NoAugmentation,
    PadCropFlip,
    RandomCropFlip,
    ResizedCropFlip,
)
from .batches import Batches
from .catalogue import NAMES, Status, Verification, data_roots, fetch, load, status, verify
from .dataset import Dataset, FolderSplit, Split, hold_out
from .errors import DataError

__all__ = [
    "AUGMENTATIONS",
    "NAMES",
    "Augmentation",
    "Batches",
    "CentreCrop",
    "DataError",
    "Dataset",
    "FolderSplit",
    "NoAugmentation",
    "PadCropFlip",
    "RandomCropFlip",
    "ResizedCropFlip",
    "Split",
    "Status",
    "Verification",
    "data_roots",
    "fetch",
    "hold_out",
    "load",
    "status",
    "verify",
]
