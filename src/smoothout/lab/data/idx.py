"""MNIST's files: IDX, plain or gzipped."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch

from smoothout.lab.data.dataset import Dataset, Split
from smoothout.lab.data.errors import DataError, read_file

UNSIGNED_BYTES = 0x08
SIDE = 28


def read_mnist(folder: Path, train_count: int = 60_000, test_count: int = 10_000) -> Dataset:
    """The four MNIST files of `folder`; the counts tell the training files from the test files."""
    return Dataset(
        name="mnist",
        train=_read_split(folder, "train", train_count),
        test=_read_split(folder, "t10k", test_count),
        class_names=tuple(str(digit) for digit in range(10)),
        image_shape=(1, SIDE, SIDE),
    )


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """An IDX file of unsigned bytes: magic 00 00 08 d, then d big-endian sizes, then exactly their product in bytes."""
    raw = _decompressed(path)
    header = 4 + 4 * dimensions
    magic = struct.pack(">HBB", 0, UNSIGNED_BYTES, dimensions)
    if len(raw) < header:
        raise DataError.at(path, found=f"{len(raw)} bytes", expected=f"an IDX header of {header} bytes")
    if raw[:4] != magic:
        raise DataError.at(path, found=f"magic number {raw[:4].hex()}", expected=f"{magic.hex()}, {dimensions}-D bytes")
    sizes = struct.unpack(f">{dimensions}I", raw[4:header])
    expected, found = math.prod(sizes), len(raw) - header
    if found != expected:
        what = "truncated" if found < expected else "trailing bytes"
        shape = " × ".join(map(str, sizes))
        raise DataError.at(path, found=f"{found} bytes of data ({what})", expected=f"{expected}, for {shape}")
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(sizes)


def _read_split(folder: Path, prefix: str, count: int) -> Split:
    images_file = _plain_or_gzipped(folder / f"{prefix}-images-idx3-ubyte")
    labels_file = _plain_or_gzipped(folder / f"{prefix}-labels-idx1-ubyte")
    images, labels = read_idx(images_file, 3), read_idx(labels_file, 1)
    if images.shape[1:] != (SIDE, SIDE):
        size = " × ".join(map(str, images.shape[1:]))
        raise DataError.at(images_file, found=f"images of {size}", expected=f"{SIDE} × {SIDE}")
    for path, found in ((images_file, len(images)), (labels_file, len(labels))):
        if found != count:
            raise DataError.at(path, found=f"{found} entries", expected=f"{count}, as the {prefix} split has")
    if labels.max(initial=0) > 9:
        row = int(labels.argmax())
        raise DataError.at(labels_file, found=f"label {labels[row]} at entry {row}", expected="labels of 0 to 9")
    # Copies, since numpy's views of `bytes` are read-only and torch wants writable memory.
    return Split(
        images=torch.from_numpy(images[:, None].copy()),
        labels=torch.from_numpy(labels.astype(np.int64)),
        mean=(0.5,),
        std=(0.5,),
    )


def _plain_or_gzipped(path: Path) -> Path:
    # A link to nothing counts as there: reading it says so, which helps more than "no file".
    zipped = path.with_name(path.name + ".gz")
    return path if (path.exists() or path.is_symlink()) else zipped


def _decompressed(path: Path) -> bytes:
    raw = read_file(path, expected="an IDX file, plain or .gz")
    if path.suffix != ".gz":
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError.at(path, found=f"broken gzip data ({error})", expected="one whole gzip stream") from error
