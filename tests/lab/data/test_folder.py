"""Image folders: what is read, what stays on disk, and what is refused."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_files import (
    EVERY_FILE,
    append,
    cut_in_half,
    empty,
    forbid_reading,
    put_text,
    write_image_folder,
    write_mnist,
)

from smoothout.lab.data import DataError, FolderSplit, Split
from smoothout.lab.data.folder import check_images, decode, read_folder
from smoothout.lab.data.idx import read_mnist


@pytest.mark.parametrize("workers", [0, 2])
def test_images_of_one_size_are_decoded_into_memory(tmp_path, workers):
    write_image_folder(tmp_path, sizes=((40, 30),))
    dataset = read_folder(tmp_path, "mine", workers)
    assert isinstance(dataset.train, Split)
    assert dataset.train.images.shape == (6, 3, 30, 40)
    assert dataset.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert dataset.class_names == ("n01", "n02")
    by_pillow = Image.open(tmp_path / "val" / "n02" / "val_1.JPEG")
    assert dataset.test.images[4, :, 3, 7].tolist() == list(by_pillow.getpixel((7, 3)))


def test_images_of_several_sizes_stay_files(tmp_path):
    write_image_folder(tmp_path, sizes=((40, 30), (30, 40), (40, 30), (50, 50)))
    dataset = read_folder(tmp_path, "mine", workers=0)
    assert isinstance(dataset.train, FolderSplit)
    assert [os.path.basename(file) for file in dataset.train.files[:3]] == [f"train_{i}.JPEG" for i in range(3)]
    assert dataset.test.labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_one_image_of_another_size_in_the_middle(tmp_path):
    write_image_folder(tmp_path)
    Image.new("RGB", (20, 40)).save(tmp_path / "train" / "n01" / "train_1.JPEG")
    dataset = read_folder(tmp_path, "mine", workers=0)
    assert isinstance(dataset.train, FolderSplit)
    assert isinstance(dataset.test, Split)


def test_grey_and_transparent_images_become_rgb(tmp_path):
    for mode in ("L", "LA", "P", "RGBA", "1"):
        Image.new(mode, (4, 4)).save(tmp_path / "image.png")
        assert decode(str(tmp_path / "image.png")).mode == "RGB"


def test_grey_images_of_16_bits_keep_their_upper_eight(tmp_path):
    levels = np.array([[0, 255, 256, 32768, 65535]], dtype=np.uint16)
    Image.fromarray(levels).save(tmp_path / "image.png")
    image = decode(str(tmp_path / "image.png"))
    assert image.mode == "RGB"
    assert [image.getpixel((x, 0)) for x in range(5)] == [(v,) * 3 for v in (0, 0, 1, 128, 255)]


def test_other_files_are_passed_over(tmp_path):
    write_image_folder(tmp_path)
    (tmp_path / "train" / "wnids.txt").write_text("n01")
    (tmp_path / "train" / "n01" / ".hidden.JPEG").write_text("")
    (tmp_path / "train" / "n01" / "notes.txt").write_text("")
    (tmp_path / "train" / ".cache").mkdir()
    assert len(read_folder(tmp_path, "mine", workers=0).train) == 6


BROKEN_IMAGES = {
    "truncated": (cut_in_half, "a broken image of"),
    "zero length": (empty, "0 bytes that are no image"),
    "no image": (put_text, "bytes that are no image"),
    **EVERY_FILE,
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("what", [what for what in BROKEN_IMAGES if what != "missing"])
def test_broken_images(tmp_path, what, workers):
    write_image_folder(tmp_path)
    corrupt, words = BROKEN_IMAGES[what]
    path = tmp_path / "train" / "n02" / "train_1.JPEG"
    corrupt(path)
    with pytest.raises(DataError) as error:
        read_folder(tmp_path, "mine", workers)
    assert words in str(error.value)
    assert str(error.value).startswith(f"{path}: found ")


def test_an_image_that_vanishes_is_found_when_it_is_used(tmp_path):
    write_image_folder(tmp_path, sizes=((40, 30), (30, 40)))
    dataset = read_folder(tmp_path, "mine", workers=0)
    check_images(dataset.train, workers=1)
    os.unlink(dataset.train.files[3])
    with pytest.raises(DataError, match=r"train_0.JPEG: found no file; expected an image"):
        check_images(dataset.train, workers=1)


def test_bytes_after_a_jpegs_end_do_no_harm(tmp_path):
    write_image_folder(tmp_path)
    before = read_folder(tmp_path, "mine", workers=0).train.images
    append(tmp_path / "train" / "n02" / "train_1.JPEG")  # cameras and editors do it
    assert torch.equal(read_folder(tmp_path, "mine", workers=0).train.images, before)


def remove_val(folder):
    shutil.rmtree(folder / "val")


def val_is_a_file(folder):
    remove_val(folder)
    (folder / "val").write_text("")


def val_is_a_dangling_link(folder):
    remove_val(folder)
    (folder / "val").symlink_to("nowhere")


def no_class(folder):
    remove_val(folder)
    (folder / "val").mkdir()


def empty_class(folder):
    for file in (folder / "val" / "n02").iterdir():
        file.unlink()


def unknown_class(folder):
    (folder / "val" / "n02").rename(folder / "val" / "n03")


def val_is_train(folder):
    remove_val(folder)
    shutil.copytree(folder / "train", folder / "val")


@pytest.mark.parametrize(
    ("corrupt", "words"),
    [
        (
            remove_val,
            "val: found no file; expected a folder with one folder of images a class (the layout is train/CLASS/",
        ),
        (val_is_a_file, "val: found a file; expected a folder"),
        (val_is_a_dangling_link, "a symbolic link to nothing"),
        (no_class, "val: found no class folder"),
        (empty_class, "n02: found no image; expected files named *.bmp"),
        (unknown_class, "n03: found a class that train has not"),
        (val_is_train, "val: found the files of train"),
    ],
)
def test_broken_folders(tmp_path, corrupt, words):
    write_image_folder(tmp_path)
    corrupt(tmp_path)
    with pytest.raises(DataError) as error:
        read_folder(tmp_path, "mine", workers=0)
    assert words in str(error.value)


@contextmanager
def ordinary_user():
    """Root reads any file, so the reading is done as an ordinary user."""
    if os.geteuid() != 0:
        yield
        return
    try:
        os.seteuid(65534)
    except PermissionError:
        pytest.skip("root here may not become another user, and root reads every file")
    try:
        yield
    finally:
        os.seteuid(0)


def test_files_that_may_not_be_read():
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        write_mnist(Path(name) / "mnist", zipped=False)
        write_image_folder(Path(name) / "images")
        labels = Path(name) / "mnist" / "train-labels-idx1-ubyte"
        image = Path(name) / "images" / "train" / "n01" / "train_0.JPEG"
        forbid_reading(labels)
        forbid_reading(image)
        with ordinary_user():
            with pytest.raises(DataError, match=r"train-labels-idx1-ubyte: found a file that this user may not read"):
                read_mnist(Path(name) / "mnist")
            with pytest.raises(DataError, match=r"train_0.JPEG: found a file that this user may not read"):
                decode(str(image))
