"""Holding out training images, and the embedded digits."""

import pytest
import torch

from smoothout.lab.data import hold_out, load
from smoothout.lab.data.dataset import Dataset, FolderSplit, generator_for


def as_rows(split):
    """The images as a list that sorts, so that sets of images can be compared."""
    return sorted(zip(map(tuple, split.images.flatten(1).tolist()), split.labels.tolist()))


def test_digits_are_all_there_and_split_evenly():
    digits = load("digits")
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert digits.test.labels.bincount().tolist() == [36] * 10
    assert digits.image_shape == (1, 8, 8) == tuple(digits.train.images.shape[1:])
    assert digits.train.images.dtype == torch.uint8
    assert len(digits.train.images.unique()) == 17
    assert digits.train.images.max() == 255
    scaled = digits.train.images.double() / 255
    assert abs(scaled.mean() - digits.train.mean[0]) < 1e-3
    assert abs(scaled.std() - digits.train.std[0]) < 1e-3


def test_the_digits_split_never_changes():
    """A new split would make old records of accuracy wrong without a word."""
    digits = load("digits")
    assert digits.test.labels[:20].tolist() == [1, 5, 2, 7, 0, 1, 6, 7, 8, 5, 7, 5, 0, 7, 0, 6, 9, 2, 6, 1]
    assert digits.test.images.long().sum().item() == 1_778_653


@pytest.mark.parametrize("n", [1, 100, 143, 1436])
def test_held_out_images_come_from_training_and_leave_it(n):
    digits = load("digits")
    held = hold_out(digits, n, seed=3)
    assert (len(held.test), len(held.train)) == (n, 1437 - n)
    assert sorted(as_rows(held.train) + as_rows(held.test)) == as_rows(digits.train)
    assert held.test_origin == f"{n} of train, seed 3"
    shares = digits.train.labels.bincount() * n / 1437
    assert ((held.test.labels.bincount(minlength=10) - shares).abs() <= 1).all()


def test_hold_out_is_a_function_of_its_seed():
    digits = load("digits")
    first, again, other = (hold_out(digits, 100, seed).test.images for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_held_out_images_never_change():
    """What was chosen on them would be compared with other images without a word."""
    held = hold_out(load("digits"), 300).test
    assert held.labels[:20].tolist() == [0, 7, 0, 4, 9, 4, 1, 0, 8, 1, 5, 0, 6, 3, 1, 2, 8, 0, 3, 2]
    assert held.images.long().sum().item() == 1_506_016


def test_files_that_are_held_out_take_their_labels_along():
    files = FolderSplit(tuple(f"{i % 3}/{i}.jpg" for i in range(30)), torch.arange(30) % 3)
    held = hold_out(Dataset("some", files, files, ("a", "b", "c"), (3, 8, 8)), 9)
    for split in (held.train, held.test):
        assert [int(file[0]) for file in split.files] == split.labels.tolist()
    assert sorted(held.train.files + held.test.files) == sorted(files.files)


@pytest.mark.parametrize("n", [0, -1, 1437, 5000])
def test_hold_out_refuses(n):
    with pytest.raises(ValueError, match="1437 training images"):
        hold_out(load("digits"), n)


def test_generators_are_functions_of_purpose_and_key():
    def number(*key):
        return torch.rand(1, generator=generator_for(*key)).item()

    assert number("order", 1, 2) == number("order", 1, 2)
    keys = [("order", 1, 2), ("order", 12), ("order", 2, 1), ("augmentation", 1, 2), ("order", -1, 2)]
    assert len({number(*key) for key in keys}) == len(keys)


def test_streams_never_change():
    """Or the same command would no longer train the run that its record is of."""
    assert generator_for("order", 3, 7).initial_seed() == 5849897753476325059
    assert generator_for("augmentation", 3, 7).initial_seed() != generator_for("order", 3, 7).initial_seed()
