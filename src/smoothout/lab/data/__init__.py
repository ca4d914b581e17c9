"""Datasets: readers, fetching with checksums, batches on the training device."""

from .augment import AUGMENTATIONS, CentreCrop, PadCropFlip, RandomCropFlip, ResizedCropFlip
from .batches import Batches
from .catalogue import NAMES, data_roots, fetch, load, status, verify
from .dataset import Dataset, FolderSplit, Split, hold_out
from .errors import DataError

__all__ = [
    "AUGMENTATIONS",
    "NAMES",
    "Batches",
    "CentreCrop",
    "DataError",
    "Dataset",
    "FolderSplit",
    "PadCropFlip",
    "RandomCropFlip",
    "ResizedCropFlip",
    "Split",
    "data_roots",
    "fetch",
    "hold_out",
    "load",
    "status",
    "verify",
]
