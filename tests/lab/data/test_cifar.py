"""CIFAR's files in both layouts: right ones are read exactly, broken ones are refused in words."""

import pickle

import numpy as np
import pytest
from small_files import (
    EVERY_FILE,
    SMALL_CIFAR10,
    SMALL_CIFAR100,
    append,
    copy_from,
    cut,
    empty,
    in_pickle,
    put_text,
    set_byte,
    write_cifar_binary,
    write_cifar_pickle,
)

from smoothout.lab.data import Batches, DataError
from smoothout.lab.data.cifar import read_cifar_binary, read_cifar_pickle

SETS = {"cifar10": SMALL_CIFAR10, "cifar100": SMALL_CIFAR100}


def is_equal(dataset, parts):
    *train, (test_images, test_labels) = parts
    images = np.concatenate([images for images, _ in train]).reshape(-1, 3, 32, 32)
    return (
        np.array_equal(dataset.train.images.numpy(), images)
        and np.array_equal(dataset.train.labels.numpy(), np.concatenate([labels for _, labels in train]))
        and np.array_equal(dataset.test.images.numpy(), test_images.reshape(-1, 3, 32, 32))
        and np.array_equal(dataset.test.labels.numpy(), test_labels)
    )


@pytest.mark.parametrize("name", SETS)
def test_reads_the_binary_layout(tmp_path, name):
    parts = write_cifar_binary(tmp_path / "c", SETS[name])
    dataset = read_cifar_binary(tmp_path / "c", SETS[name])
    assert is_equal(dataset, parts)
    assert dataset.class_names[:2] == ("class-0", "class-1")
    assert dataset.image_shape == (3, 32, 32)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("name", SETS)
def test_reads_the_pickle_layout(tmp_path, name, protocol):
    parts = write_cifar_pickle(tmp_path / "c", SETS[name], protocol)
    dataset = read_cifar_pickle(tmp_path / "c", SETS[name])
    assert is_equal(dataset, parts)
    assert dataset.class_names[-1] == f"class-{SETS[name].classes - 1}"


@pytest.mark.parametrize("name", SETS)
def test_images_are_normalised_as_imagenets(tmp_path, name):
    (images, _), *_ = write_cifar_binary(tmp_path / "c", SETS[name])
    batch, _ = next(iter(Batches(read_cifar_binary(tmp_path / "c", SETS[name]).train, 2)))
    mean, sd = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = (images[:2].reshape(2, 3, 32, 32) / 255 - mean[:, None, None]) / sd[:, None, None]
    np.testing.assert_allclose(batch.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_class_names_may_be_absent_but_not_wrong(tmp_path):
    write_cifar_binary(tmp_path / "c", SMALL_CIFAR10)
    names = tmp_path / "c" / "batches.meta.txt"
    names.write_text("cat\ndog\n")
    with pytest.raises(DataError, match="found 2 class names; expected 10"):
        read_cifar_binary(tmp_path / "c", SMALL_CIFAR10)
    names.unlink()
    assert read_cifar_binary(tmp_path / "c", SMALL_CIFAR10).class_names[3] == "3"


BINARY = {
    "truncated": ("data_batch_2.bin", cut, "61453 bytes; expected 61460, 20 rows of 3073"),
    "trailing bytes": ("data_batch_2.bin", append, "61464 bytes; expected 61460"),
    "zero length": ("test_batch.bin", empty, "found 0 bytes"),
    "text": ("data_batch_3.bin", put_text, "bytes; expected 61460"),
    "label out of range": ("data_batch_4.bin", set_byte(3073 * 2, 10), "label 10 in row 2; expected labels of 0 to 9"),
    "a label changed": ("test_batch.bin", set_byte(0, 3), "images a class; expected 2 of each"),
    "the test file in a training file's place": (
        "data_batch_1.bin",
        copy_from("test_batch.bin"),
        "the images of test_batch.bin; expected training images",
    ),
    **{what: ("data_batch_5.bin", *how) for what, how in EVERY_FILE.items()},
}


@pytest.mark.parametrize("what", BINARY)
def test_broken_binary_files(tmp_path, what):
    write_cifar_binary(tmp_path / "c", SMALL_CIFAR10)
    refuses(read_cifar_binary, tmp_path / "c", SMALL_CIFAR10, *BINARY[what])


def test_a_training_file_in_the_test_files_place(tmp_path):
    write_cifar_binary(tmp_path / "c", SMALL_CIFAR10)
    (tmp_path / "c" / "data_batch_1.bin").rename(tmp_path / "c" / "swap")
    (tmp_path / "c" / "test_batch.bin").rename(tmp_path / "c" / "data_batch_1.bin")
    (tmp_path / "c" / "swap").rename(tmp_path / "c" / "test_batch.bin")
    with pytest.raises(DataError, match="is a file of the other split in its place"):
        read_cifar_binary(tmp_path / "c", SMALL_CIFAR10)


CIFAR100_BINARY = {
    "fine label out of range": ("train.bin", set_byte(1, 100), "label 100 in row 0; expected labels of 0 to 99"),
    "the test file in the training file's place": ("train.bin", copy_from("test.bin"), "expected 614800, 200 rows"),
    "the training file in the test file's place": ("test.bin", copy_from("train.bin"), "expected 307400, 100 rows"),
}


@pytest.mark.parametrize("what", CIFAR100_BINARY)
def test_broken_cifar100_files(tmp_path, what):
    write_cifar_binary(tmp_path / "c", SMALL_CIFAR100)
    refuses(read_cifar_binary, tmp_path / "c", SMALL_CIFAR100, *CIFAR100_BINARY[what])


class _Malicious:
    def __reduce__(self):
        import os

        return os.system, ("touch pwned",)


def put_malice(path):
    path.write_bytes(pickle.dumps({b"data": _Malicious()}, 2))


PICKLE = {
    "truncated": ("data_batch_2", cut, "no CIFAR pickle"),
    "trailing bytes": ("data_batch_2", append, "4 trailing bytes"),
    "zero length": ("test_batch", empty, "no CIFAR pickle (Ran out of input)"),
    "text": ("data_batch_3", put_text, "no CIFAR pickle"),
    "a pickle of something else": ("data_batch_1", lambda p: p.write_bytes(pickle.dumps([1])), "a pickled list"),
    "no data": ("data_batch_1", in_pickle(data=None), "'data': NoneType; expected uint8 of (20, 3072)"),
    "wrong count": ("data_batch_1", in_pickle(data=np.zeros((19, 3072), np.uint8)), "uint8 of (19, 3072)"),
    "wrong type": ("data_batch_1", in_pickle(data=np.zeros((20, 3072))), "float64 of (20, 3072)"),
    "too few labels": ("data_batch_1", in_pickle(labels=[1] * 19), "'labels': 19 of them; expected 20"),
    "label out of range": ("data_batch_1", in_pickle(labels=[1] * 19 + [-1]), "label -1 in row 19"),
    "labels of another type": ("data_batch_1", in_pickle(labels=["cat"] * 20), "expected 20 whole numbers"),
    "the test file in a training file's place": (
        "data_batch_1",
        copy_from("test_batch"),
        "testing batch 1 of 1; expected a training batch",
    ),
    "a training file in the test file's place": (
        "test_batch",
        copy_from("data_batch_1"),
        "training batch 1 of 5; expected a testing batch",
    ),
    "a program in it": ("data_batch_1", put_malice, "it asks for posix.system"),
    "names broken": ("batches.meta", in_pickle(label_names=None), "no list of names under 'label_names'"),
    **{what: ("data_batch_5", *how) for what, how in EVERY_FILE.items()},
}


@pytest.mark.parametrize("what", PICKLE)
def test_broken_pickle_files(tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    write_cifar_pickle(tmp_path / "c", SMALL_CIFAR10)
    refuses(read_cifar_pickle, tmp_path / "c", SMALL_CIFAR10, *PICKLE[what])
    assert not (tmp_path / "pwned").exists()


def refuses(read, folder, cifar, file, corrupt, words):
    corrupt(folder / file)
    with pytest.raises(DataError) as error:
        read(folder, cifar)
    assert words in str(error.value)
    assert str(folder / file) in str(error.value)
