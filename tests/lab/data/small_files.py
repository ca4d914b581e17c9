"""Small files in the layouts of the real datasets, and ways to break them."""

import gzip
import os
import pickle
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from smoothout.lab.data.cifar import CIFAR10, CIFAR100

SMALL_CIFAR10 = replace(CIFAR10, train_rows=20, test_rows=20)
SMALL_CIFAR100 = replace(CIFAR100, train_rows=200, test_rows=100)
MNIST_TRAIN, MNIST_TEST = 30, 20


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(folder: Path, zipped: bool = True) -> dict[str, np.ndarray]:
    """The four files; what is in them by file name without suffix."""
    folder.mkdir(parents=True)
    random = np.random.RandomState(0)
    content = {}
    for prefix, count in (("train", MNIST_TRAIN), ("t10k", MNIST_TEST)):
        content[f"{prefix}-images-idx3-ubyte"] = random.randint(0, 256, (count, 28, 28), dtype=np.uint8)
        content[f"{prefix}-labels-idx1-ubyte"] = random.randint(0, 10, count, dtype=np.uint8)
    for name, array in content.items():
        raw = idx_bytes(array)
        (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(raw) if zipped else raw)
    return content


def cifar_arrays(cifar):
    """Random images and labels a file; a split is balanced, its single files are not."""
    random = np.random.RandomState(1)

    def labels(count):
        return random.permutation(np.arange(count) % cifar.classes)

    train = labels(cifar.train_rows * len(cifar.binary_train)).reshape(len(cifar.binary_train), -1)
    for part in (*train, labels(cifar.test_rows)):
        yield random.randint(0, 256, (len(part), 3072), dtype=np.uint8), part


def write_cifar_binary(folder: Path, cifar) -> list:
    folder.mkdir(parents=True)
    parts = list(cifar_arrays(cifar))
    for name, (images, labels) in zip((*cifar.binary_train, cifar.binary_test), parts):
        coarse = [labels % 20] * (cifar.label_bytes - 1)
        columns = [np.asarray(column, np.uint8)[:, None] for column in (*coarse, labels)]
        (folder / name).write_bytes(np.concatenate([*columns, images], axis=1).tobytes())
    names = "\n".join(f"class-{i}" for i in range(cifar.classes))
    (folder / cifar.binary_names).write_text(names + "\n\n")  # the original ends in an empty line
    return parts


def write_cifar_pickle(folder: Path, cifar, protocol: int = 2) -> list:
    folder.mkdir(parents=True)
    parts = list(cifar_arrays(cifar))
    for name, (images, labels) in zip((*cifar.pickle_train, cifar.pickle_test), parts):
        kind = b"testing batch 1 of 1" if name == cifar.pickle_test else b"training batch 1 of 5"
        content = {b"batch_label": kind, cifar.label_key: labels.tolist(), b"data": images, b"filenames": []}
        (folder / name).write_bytes(pickle.dumps(content, protocol))
    file, key = cifar.pickle_names
    (folder / file).write_bytes(pickle.dumps({key: [b"class-%d" % i for i in range(cifar.classes)]}, protocol))
    return parts


def write_image_folder(folder: Path, sizes=((40, 40),), per_class: int = 3, suffix: str = ".JPEG") -> None:
    """Two classes; the sizes (width, height) are taken in turn. Smooth images, so that JPEG keeps them well."""
    random = np.random.RandomState(2)
    turn = 0
    for part in ("train", "val"):
        for name in ("n01", "n02"):
            (folder / part / name).mkdir(parents=True)
            for number in range(per_class):
                coarse = Image.fromarray(random.randint(0, 256, (4, 4, 3), dtype=np.uint8))
                image = coarse.resize(sizes[turn % len(sizes)], Image.Resampling.BICUBIC)
                image.save(folder / part / name / f"{part}_{number}{suffix}", quality=95)
                turn += 1


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def put_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def put_text(path: Path) -> None:
    path.write_text("<html>404: not the file you asked for</html>" * 40)


def copy_from(other: str):
    def corrupt(path: Path) -> None:
        shutil.copy(path.with_name(other), path)

    return corrupt


def set_byte(position: int, value: int):
    def corrupt(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[position] = value
        path.write_bytes(raw)

    return corrupt


def in_gzip(corrupt):
    """Break what is inside of a sound gzip file."""

    def corrupt_inside(path: Path) -> None:
        path.write_bytes(gzip.decompress(path.read_bytes()))
        corrupt(path)
        path.write_bytes(gzip.compress(path.read_bytes()))

    return corrupt_inside


def in_pickle(**changes):
    """Replace entries of a pickled dictionary; None takes one out."""

    def corrupt(path: Path) -> None:
        content = pickle.loads(path.read_bytes(), encoding="bytes")
        for key, value in changes.items():
            content.pop(key.encode())
            if value is not None:
                content[key.encode()] = value
        path.write_bytes(pickle.dumps(content, 2))

    return corrupt


def forbid_reading(path: Path) -> None:
    os.chmod(path, 0)


# What can befall a file of any format, and the words of its error.
EVERY_FILE = {
    "missing": (remove, "found no file"),
    "a directory": (put_directory, "found a directory"),
    "a link to nothing": (put_dangling_link, "a symbolic link to nothing"),
}
