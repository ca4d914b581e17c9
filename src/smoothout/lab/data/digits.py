"""The embedded data: scikit-learn's 1,797 handwritten digits of 8 × 8. No network, no files to fetch."""

from typing import Any

import numpy as np
import torch

from smoothout.lab.data.dataset import Dataset, Split

TEST_PER_CLASS = 36
SPLIT_SEED = 2018
# Of the training images, on the scale where the darkest pixel is 1.
MEAN, STD = 0.306, 0.376


def read_digits() -> Dataset:
    """360 test images, 36 of each digit, and the other 1,437 for training; the same ones for ever.

    Within each class a permutation by numpy's `RandomState`, whose streams are frozen, picks the test images.
    The 17 grey levels 0 … 16 are spread over 0 … 255.
    """
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    grey, labels = digits["data"], digits["target"]
    images = torch.from_numpy(np.rint(grey * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8))
    random = np.random.RandomState(SPLIT_SEED)
    in_test = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        in_test[random.permutation(np.flatnonzero(labels == digit))[:TEST_PER_CLASS]] = True
    whole = Split(images=images, labels=torch.from_numpy(labels.astype(np.int64)), mean=(MEAN,), std=(STD,))
    return Dataset(
        name="digits",
        train=whole.take(torch.from_numpy(np.flatnonzero(~in_test))),
        test=whole.take(torch.from_numpy(np.flatnonzero(in_test))),
        class_names=tuple(str(digit) for digit in range(10)),
        image_shape=(1, 8, 8),
    )
