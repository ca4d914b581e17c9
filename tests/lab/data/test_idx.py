"""MNIST's files: right ones are read exactly, broken ones are refused in words."""

import gzip

import numpy as np
import pytest
from small_files import (
    EVERY_FILE,
    MNIST_TEST,
    MNIST_TRAIN,
    append,
    copy_from,
    cut,
    empty,
    idx_bytes,
    in_gzip,
    put_text,
    set_byte,
    write_mnist,
)

from smoothout.lab.data import DataError
from smoothout.lab.data.idx import read_mnist


def read(folder):
    return read_mnist(folder, MNIST_TRAIN, MNIST_TEST)


@pytest.mark.parametrize("zipped", [True, False])
def test_reads_every_pixel_and_label(tmp_path, zipped):
    content = write_mnist(tmp_path / "mnist", zipped)
    dataset = read(tmp_path / "mnist")
    for prefix, split in (("train", dataset.train), ("t10k", dataset.test)):
        assert np.array_equal(split.images[:, 0].numpy(), content[f"{prefix}-images-idx3-ubyte"])
        assert np.array_equal(split.labels.numpy(), content[f"{prefix}-labels-idx1-ubyte"])
    assert dataset.image_shape == (1, 28, 28)
    assert (dataset.classes, dataset.train.mean, dataset.test.std) == (10, (0.5,), (0.5,))


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def narrow_images(path):
    path.write_bytes(idx_bytes(np.zeros((MNIST_TRAIN, 28, 27), np.uint8)))


PLAIN = {
    "truncated": (IMAGES, cut, "23513 bytes of data (truncated); expected 23520"),
    "trailing bytes": (IMAGES, append, "23524 bytes of data (trailing bytes)"),
    "zero length": (IMAGES, empty, "0 bytes; expected an IDX header of 16"),
    "wrong magic": (IMAGES, set_byte(2, 9), "magic number 00000903; expected 00000803"),
    "labels in the images' place": (IMAGES, copy_from(LABELS), "magic number 00000801"),
    "images in the labels' place": (LABELS, copy_from(IMAGES), "magic number 00000803; expected 00000801"),
    "text": (IMAGES, put_text, "magic number 3c68746d"),
    "wrong count": (IMAGES, set_byte(7, 29), "expected 22736, for 29 × 28 × 28"),
    "test images in the training images' place": (
        IMAGES,
        copy_from("t10k-images-idx3-ubyte"),
        "20 entries; expected 30",
    ),
    "test labels in the training labels' place": (
        LABELS,
        copy_from("t10k-labels-idx1-ubyte"),
        "20 entries; expected 30",
    ),
    "label out of range": (LABELS, set_byte(8 + 4, 10), "label 10 at entry 4; expected labels of 0 to 9"),
    "wrong image size": (IMAGES, narrow_images, "images of 28 × 27; expected 28 × 28"),
}
GZIPPED = {
    "truncated": (IMAGES, cut, "broken gzip data"),
    "trailing bytes": (IMAGES, append, "broken gzip data"),
    "zero length": (IMAGES, empty, "0 bytes; expected an IDX header"),
    "no gzip": (IMAGES, put_text, "broken gzip data (Not a gzipped file"),
    "a flipped byte": (IMAGES, set_byte(2000, 0), "broken gzip data"),
    "truncated inside": (IMAGES, in_gzip(cut), "23513 bytes of data (truncated)"),
    "label out of range": (LABELS, in_gzip(set_byte(8, 200)), "label 200 at entry 0"),
    **{what: (LABELS, *how) for what, how in EVERY_FILE.items()},
}


@pytest.mark.parametrize("what", PLAIN)
def test_broken_plain_files(tmp_path, what):
    write_mnist(tmp_path / "mnist", zipped=False)
    refuses(tmp_path / "mnist", *PLAIN[what], suffix="")


@pytest.mark.parametrize("what", GZIPPED)
def test_broken_gzipped_files(tmp_path, what):
    write_mnist(tmp_path / "mnist")
    refuses(tmp_path / "mnist", *GZIPPED[what], suffix=".gz")


def test_a_plain_file_in_a_gzipped_ones_place(tmp_path):
    write_mnist(tmp_path / "mnist")
    path = tmp_path / "mnist" / f"{IMAGES}.gz"
    path.write_bytes(gzip.decompress(path.read_bytes()))
    with pytest.raises(DataError, match="broken gzip data"):
        read(tmp_path / "mnist")


def refuses(folder, file, corrupt, words, suffix):
    path = folder / (file + suffix)
    corrupt(path)
    with pytest.raises(DataError) as error:
        read(folder)
    assert words in str(error.value)
    assert str(path) in str(error.value)
