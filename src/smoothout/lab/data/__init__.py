"""Datasets: readers, fetching with checksums, batches on the training device."""

from smoothout.lab.data.augment import AUGMENTATIONS, CentreCrop, PadCropFlip, RandomCropFlip, ResizedCropFlip
from smoothout.lab.data.batches import Batches
from smoothout.lab.data.catalogue import NAMES, data_roots, fetch, load, status, verify
from smoothout.lab.data.dataset import Dataset, FolderSplit, Split, hold_out
from smoothout.lab.data.errors import DataError

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
