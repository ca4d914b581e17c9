"""CIFAR-10 and CIFAR-100, in the binary and in the pickle ("python") layout."""

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from smoothout.lab.data.dataset import IMAGENET_MEAN, IMAGENET_STD, Dataset, Split
from smoothout.lab.data.errors import DataError, read_file

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Cifar:
    """What tells one CIFAR set from the other, and how many rows its files have."""

    name: str
    classes: int
    binary_train: tuple[str, ...]
    binary_test: str
    binary_names: str
    pickle_train: tuple[str, ...]
    pickle_test: str
    pickle_names: tuple[str, bytes]
    label_key: bytes
    label_bytes: int
    train_rows: int
    test_rows: int

    def row_count(self, file: str) -> int:
        """How many images `file` has to hold."""
        return self.test_rows if file in (self.binary_test, self.pickle_test) else self.train_rows


CIFAR10 = Cifar(
    name="cifar10",
    classes=10,
    binary_train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    binary_test="test_batch.bin",
    binary_names="batches.meta.txt",
    pickle_train=tuple(f"data_batch_{i}" for i in range(1, 6)),
    pickle_test="test_batch",
    pickle_names=("batches.meta", b"label_names"),
    label_key=b"labels",
    label_bytes=1,
    train_rows=10_000,
    test_rows=10_000,
)

CIFAR100 = Cifar(
    name="cifar100",
    classes=100,
    binary_train=("train.bin",),
    binary_test="test.bin",
    binary_names="fine_label_names.txt",
    pickle_train=("train",),
    pickle_test="test",
    pickle_names=("meta", b"fine_label_names"),
    label_key=b"fine_labels",
    label_bytes=2,  # the coarse label, then the fine one
    train_rows=50_000,
    test_rows=10_000,
)


def read_cifar_binary(folder: Path, cifar: Cifar) -> Dataset:
    """Rows of label bytes, then the red, green and blue planes, each 32 × 32 by rows."""
    path = folder / cifar.binary_names
    names = None
    if path.exists():
        try:
            names = read_file(path, expected="the class names").decode().split()
        except UnicodeDecodeError as error:
            raise DataError.at(path, found="bytes that are no text", expected="one class name a line") from error
    return _assemble(
        folder, cifar, cifar.binary_train, cifar.binary_test, _binary_rows, _checked_names(path, names, cifar)
    )


def read_cifar_pickle(folder: Path, cifar: Cifar) -> Dataset:
    """Pickled dictionaries of a uint8 array (rows × 3072) and a list of labels; nothing else is ever unpickled."""
    file, key = cifar.pickle_names
    path = folder / file
    names = None
    if path.exists():
        found = _unpickled(path).get(key)
        if not isinstance(found, list) or not all(isinstance(name, bytes) for name in found):
            raise DataError.at(path, found=f"no list of names under {key.decode()!r}", expected="the class names")
        names = [name.decode("utf-8", "replace") for name in found]
    return _assemble(
        folder, cifar, cifar.pickle_train, cifar.pickle_test, _pickle_rows, _checked_names(path, names, cifar)
    )


_Rows = tuple[np.ndarray, np.ndarray]


def _assemble(
    folder: Path,
    cifar: Cifar,
    train_files: tuple[str, ...],
    test_file: str,
    read_rows: Callable[[Path, Cifar], _Rows],
    class_names: tuple[str, ...],
) -> Dataset:
    train_parts = [read_rows(folder / file, cifar) for file in train_files]
    test = read_rows(folder / test_file, cifar)
    for file, part in zip(train_files, train_parts):
        if np.array_equal(part[0], test[0]):
            raise DataError.at(folder / file, found=f"the images of {test_file}", expected="training images")
    train = (
        np.concatenate([images for images, _ in train_parts]),
        np.concatenate([labels for _, labels in train_parts]),
    )
    where = folder / train_files[0] if len(train_files) == 1 else f"{folder}/{train_files[0]} … {train_files[-1]}"
    return Dataset(
        name=cifar.name,
        train=_as_split(where, train, cifar),
        test=_as_split(folder / test_file, test, cifar),
        class_names=class_names,
        image_shape=(3, 32, 32),
    )


def _as_split(where: Path | str, rows: _Rows, cifar: Cifar) -> Split:
    images, labels = rows
    # Both sets are balanced as a whole while their single training files are not: a swapped file shows here.
    counts = np.bincount(labels, minlength=cifar.classes)
    if counts.min() != counts.max():
        raise DataError.at(
            where,
            found=f"{counts.min()} to {counts.max()} images a class",
            expected=f"{len(labels) // cifar.classes} of each (is a file of the other split in its place?)",
        )
    return Split(
        images=torch.from_numpy(images.reshape(-1, 3, 32, 32)),
        labels=torch.from_numpy(labels),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def _binary_rows(path: Path, cifar: Cifar) -> _Rows:
    raw = read_file(path, expected="a CIFAR binary file")
    rows, width = cifar.row_count(path.name), cifar.label_bytes + PIXELS
    if len(raw) != rows * width:
        raise DataError.at(path, found=f"{len(raw)} bytes", expected=f"{rows * width}, {rows} rows of {width}")
    table = np.frombuffer(raw, dtype=np.uint8).reshape(rows, width)
    labels = table[:, cifar.label_bytes - 1].astype(np.int64)
    return table[:, cifar.label_bytes :].copy(), _checked_labels(path, labels, cifar)


def _pickle_rows(path: Path, cifar: Cifar) -> _Rows:
    content = _unpickled(path)
    data, labels, rows = content.get(b"data"), content.get(cifar.label_key), cifar.row_count(path.name)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (rows, PIXELS):
        found = f"{data.dtype} of {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise DataError.at(path, found=f"'data': {found}", expected=f"uint8 of {(rows, PIXELS)}")
    if not isinstance(labels, list) or len(labels) != rows or not all(type(label) is int for label in labels):
        found = f"{len(labels)} of them" if isinstance(labels, list) else type(labels).__name__
        raise DataError.at(path, found=f"{cifar.label_key.decode()!r}: {found}", expected=f"{rows} whole numbers")
    _check_batch_label(path, content.get(b"batch_label"), is_test=path.name == cifar.pickle_test)
    return data, _checked_labels(path, np.array(labels, dtype=np.int64), cifar)


def _check_batch_label(path: Path, label: object, is_test: bool) -> None:
    kind = b"testing" if is_test else b"training"
    if isinstance(label, bytes) and not label.startswith(kind):
        raise DataError.at(path, found=label.decode("utf-8", "replace"), expected=f"a {kind.decode()} batch")


def _checked_labels(path: Path, labels: np.ndarray, cifar: Cifar) -> np.ndarray:
    wrong = np.flatnonzero((labels < 0) | (labels >= cifar.classes))
    if len(wrong):
        row = int(wrong[0])
        expected = f"labels of 0 to {cifar.classes - 1}"
        raise DataError.at(path, found=f"label {labels[row]} in row {row}", expected=expected)
    return labels


def _checked_names(path: Path, names: list[str] | None, cifar: Cifar) -> tuple[str, ...]:
    """The names' file is a courtesy: without it classes are called by their numbers."""
    if names is None:
        return tuple(str(label) for label in range(cifar.classes))
    if len(names) != cifar.classes:
        raise DataError.at(path, found=f"{len(names)} class names", expected=str(cifar.classes))
    return tuple(names)


def _unpickled(path: Path) -> Mapping[object, object]:
    stream = io.BytesIO(read_file(path, expected="a CIFAR pickle file"))
    try:
        content = _ArraysOnly(stream, encoding="bytes").load()
    except Exception as error:  # a broken pickle can raise nearly anything
        raise DataError.at(path, found=f"no CIFAR pickle ({error})", expected="a dictionary of arrays") from error
    if trailing := len(stream.read()):
        raise DataError.at(path, found=f"{trailing} trailing bytes", expected="the end after one pickle")
    if not isinstance(content, dict):
        raise DataError.at(path, found=f"a pickled {type(content).__name__}", expected="a dictionary of arrays")
    return content


def _latin1_bytes(text: str, encoding: object = None) -> bytes:
    return text.encode("latin1")


class _ArraysOnly(pickle.Unpickler):
    """Unpickles numpy arrays and Python's basic containers; a pickle that asks for anything else is refused.

    A pickle names functions that unpickling calls, so an ordinary one may run any program.
    """

    # numpy's own rebuilding functions, asked of an array since their module has moved between versions.
    _REBUILD = np.empty(0, np.uint8).__reduce__()[0]
    _FROM_BUFFER = np.empty(0, np.uint8).__reduce_ex__(5)[0]
    _ALLOWED = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _REBUILD,
        ("numpy._core.multiarray", "_reconstruct"): _REBUILD,
        ("numpy.core.numeric", "_frombuffer"): _FROM_BUFFER,
        ("numpy._core.numeric", "_frombuffer"): _FROM_BUFFER,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): _latin1_bytes,  # how protocols 0 to 2 write bytes
    }

    def find_class(self, module_name: str, global_name: str, /) -> object:
        try:
            return self._ALLOWED[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}") from None
