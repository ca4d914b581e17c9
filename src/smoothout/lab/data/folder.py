"""Image folders in ImageNet's layout, train/CLASS/*.JPEG and val/CLASS/*.JPEG: Pillow decodes in worker processes."""

import io
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from smoothout.lab.data.augment import BoxAugmentation
from smoothout.lab.data.dataset import IMAGENET_MEAN, IMAGENET_STD, AnySplit, Dataset, FolderSplit, Split
from smoothout.lab.data.errors import DataError, read_file, why_unreadable

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
IN_MEMORY_BYTES = 2 * 2**30
DECODE_AT_ONCE = 64


def read_folder(folder: Path, name: str, workers: int | None = None) -> Dataset:
    """Splits of one image size and at most 2 GiB are decoded into memory; others stay files, decoded when used."""
    class_names = _class_names(folder / "train")
    train, val = (_list_files(folder / part, class_names) for part in ("train", "val"))
    _check_splits_differ(folder, train, val)
    return Dataset(
        name=name,
        train=_in_memory(train, workers) or train,
        test=_in_memory(val, workers) or val,
        class_names=class_names,
        image_shape=(3, 224, 224),
        evaluate="centre-crop",
    )


def check_images(split: AnySplit, workers: int | None = None) -> None:
    """Decode every file of a split, so that one which is no image is found now."""
    if isinstance(split, FolderSplit):
        for _ in decoded(split, torch.arange(len(split)).split(DECODE_AT_ONCE), _nothing_of, workers):
            pass


ImageUse = Callable[[Image.Image, int], Tensor]


def decoded(
    split: FolderSplit, batches: Sequence[Tensor], use: ImageUse, workers: int | None = None, pin_memory: bool = False
) -> Iterator[Tensor]:
    """For each batch of rows, in order and ahead of time, the stacked tensors that `use(image, row)` makes.

    Args:
        use: runs in the worker processes, so it must pickle.
        workers: how many processes; 0 decodes in this one, None takes one a core, up to eight.
    """
    loader = DataLoader(
        _DecodedBatches(split, tuple(batches), use),
        batch_size=None,
        num_workers=_default_workers(len(batches)) if workers is None else workers,
        pin_memory=pin_memory,
        # Its own generator: a loader without one takes a number from the global stream, which dropout shares.
        generator=torch.Generator(),
    )
    for images in loader:
        if isinstance(images, DataError):
            raise images
        yield images


@dataclass(frozen=True)
class _DecodedBatches(TorchDataset):
    split: FolderSplit
    batches: tuple[Tensor, ...]
    use: ImageUse

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Tensor | DataError:
        # An error is handed over as a value: raised here it would arrive wrapped in the worker's traceback.
        try:
            return torch.stack([self.use(decode(self.split.files[row]), row) for row in self.batches[index].tolist()])
        except DataError as error:
            return error


def decode(file: str) -> Image.Image:
    """A file's image in RGB."""
    raw = read_file(Path(file), expected="an image")
    try:
        with Image.open(io.BytesIO(raw)) as image:
            return _in_8_bits(image).convert("RGB")
    except Image.UnidentifiedImageError as error:
        raise DataError.at(file, found=f"{len(raw)} bytes that are no image", expected="an image") from error
    except (OSError, ValueError, SyntaxError, struct.error, Image.DecompressionBombError) as error:
        raise DataError.at(file, found=f"a broken image of {len(raw)} bytes ({error})", expected="an image") from error


def _in_8_bits(image: Image.Image) -> Image.Image:
    """A grey PNG of 16 bits by the upper eight: Pillow's conversion would make everything above 255 white."""
    if not image.mode.startswith("I"):  # I;16, or I where an older Pillow read it
        return image
    return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))


@dataclass(frozen=True)
class CutAndResize:
    """What a box augmentation's `apply` does to a batch, done to one image by Pillow.

    Args:
        uniforms: the augmentation's numbers, one row per image of the split.
    """

    augment: BoxAugmentation
    uniforms: Tensor

    def __call__(self, image: Image.Image, row: int) -> Tensor:
        height, width = torch.tensor([float(image.height)]), torch.tensor([float(image.width)])
        boxes, mirrored = self.augment.boxes(height, width, self.uniforms[row : row + 1])
        left, top, right, bottom = boxes[0].tolist()
        # Pillow refuses a box that rounding put a hair outside.
        box = (max(left, 0.0), max(top, 0.0), min(right, image.width), min(bottom, image.height))
        image = image.resize((self.augment.size, self.augment.size), Image.Resampling.BILINEAR, box=box)
        return _as_tensor(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if bool(mirrored[0]) else image)


class _OtherSizeError(DataError):
    """An image whose size is not that of the others."""


@dataclass(frozen=True)
class _WholeImage:
    """The image as it is, where it has the size of the others."""

    size: tuple[int, int]

    def __call__(self, image: Image.Image, row: int) -> Tensor:
        if image.size != self.size:
            raise _OtherSizeError(f"image {row} is of size {image.size}, not {self.size}")
        return _as_tensor(image)


def _nothing_of(image: Image.Image, row: int) -> Tensor:
    return torch.empty(0)


def _as_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def _default_workers(batches: int) -> int:
    # A single batch is decoded sooner than a process starts.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(8, cores, batches - 1))


def _class_names(part: Path) -> tuple[str, ...]:
    expected = "a folder with one folder of images a class (the layout is train/CLASS/*.jpg and val/CLASS/*.jpg)"
    try:
        with os.scandir(part) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        found = "a file" if part.is_file() else why_unreadable(part, error)
        raise DataError.at(part, found=found, expected=expected) from error
    if not names:
        raise DataError.at(part, found="no class folder", expected=expected)
    return tuple(names)


def _list_files(part: Path, class_names: tuple[str, ...]) -> FolderSplit:
    present = _class_names(part)
    for name in present:
        if name not in class_names:
            raise DataError.at(part / name, found="a class that train has not", expected=f"{len(class_names)} of train")
    files: list[str] = []
    labels: list[int] = []
    for name in present:
        images = sorted(_image_files(part / name))
        if not images:
            raise DataError.at(part / name, found="no image", expected=f"files named *{', *'.join(SUFFIXES)}")
        files += images
        labels += [class_names.index(name)] * len(images)
    return FolderSplit(files=tuple(files), labels=torch.tensor(labels))


def _image_files(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries]
    return [str(folder / name) for name in names if name.lower().endswith(SUFFIXES) and not name.startswith(".")]


def _check_splits_differ(folder: Path, train: FolderSplit, val: FolderSplit) -> None:
    """A val folder that was copied from train would pass for a test set, one that the model knows by heart."""
    names_in_train = {os.path.relpath(file, folder / "train") for file in train.files}
    names_in_val = {os.path.relpath(file, folder / "val") for file in val.files}
    if names_in_train == names_in_val:
        expected = "an image"
        if read_file(Path(train.files[0]), expected) == read_file(Path(val.files[0]), expected):
            raise DataError.at(folder / "val", found="the files of train", expected="images that are not in train")


def _in_memory(split: FolderSplit, workers: int | None) -> Split | None:
    """The split decoded, or None where sizes differ or it would be too large."""
    size = decode(split.files[0]).size
    width, height = size
    if len(split) * 3 * height * width > IN_MEMORY_BYTES or decode(split.files[-1]).size != size:
        return None
    images = torch.empty(len(split), 3, height, width, dtype=torch.uint8)
    batches = torch.arange(len(split)).split(DECODE_AT_ONCE)
    try:
        for rows, batch in zip(batches, decoded(split, batches, _WholeImage(size), workers)):
            images[rows] = batch
    except _OtherSizeError:
        return None
    return Split(images=images, labels=split.labels, mean=IMAGENET_MEAN, std=IMAGENET_STD)
