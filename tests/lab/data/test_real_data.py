"""The real datasets, where $SMOOTHOUT_DATA has them: sizes, class counts and channel means as published."""

import os

import pytest
import torch

from smoothout.lab.data import Batches, Split, load, status

pytestmark = pytest.mark.real_data


def real(name):
    if not os.environ.get("SMOOTHOUT_DATA"):
        pytest.skip("$SMOOTHOUT_DATA is not set, so there are no real data to read")
    if not any(each.name == name and each.is_here for each in status()):
        pytest.skip(f"$SMOOTHOUT_DATA has no {name}")
    return load(name)


def channel_means(split):
    return torch.stack([split.images[:, channel].double().mean() / 255 for channel in range(split.images.shape[1])])


def test_mnist():
    mnist = real("mnist")
    assert mnist.train.images.shape == (60_000, 1, 28, 28)
    assert mnist.test.images.shape == (10_000, 1, 28, 28)
    assert mnist.train.labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert mnist.test.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert mnist.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    torch.testing.assert_close(channel_means(mnist.train), torch.tensor([0.1307]).double(), rtol=0, atol=1e-4)


def test_cifar10():
    cifar = real("cifar10")
    assert cifar.train.images.shape == (50_000, 3, 32, 32)
    assert cifar.test.images.shape == (10_000, 3, 32, 32)
    assert cifar.train.labels.bincount().tolist() == [5000] * 10
    assert cifar.test.labels.bincount().tolist() == [1000] * 10
    assert cifar.class_names[:3] == ("airplane", "automobile", "bird")
    assert [cifar.class_names[label] for label in cifar.train.labels[:3]] == ["frog", "truck", "truck"]
    expected = torch.tensor([0.4914, 0.4822, 0.4465]).double()
    torch.testing.assert_close(channel_means(cifar.train), expected, rtol=0, atol=1e-4)


def test_cifar100():
    cifar = real("cifar100")
    assert cifar.train.labels.bincount().tolist() == [500] * 100
    assert cifar.test.labels.bincount().tolist() == [100] * 100
    expected = torch.tensor([0.5071, 0.4865, 0.4409]).double()
    torch.testing.assert_close(channel_means(cifar.train), expected, rtol=0, atol=1e-3)


def test_imagenette():
    imagenette = real("imagenette")
    assert imagenette.classes == 10
    assert imagenette.class_names[0] == "n01440764"
    if not isinstance(imagenette.train, Split):
        pytest.skip("another version, of other sizes")
    assert imagenette.train.images.shape == (2500, 3, 128, 128)
    assert imagenette.train.labels.bincount().tolist() == [250] * 10
    assert imagenette.test.labels.bincount().tolist() == [100] * 10
    # Photos as ImageNet's, whose means are 0.485, 0.456, 0.406.
    expected = torch.tensor([0.4591, 0.4550, 0.4260]).double()
    torch.testing.assert_close(channel_means(imagenette.train), expected, rtol=0, atol=1e-3)
    x, y = next(iter(Batches(imagenette.test, 8, augment=imagenette.evaluate)))
    assert x.shape == (8, *imagenette.image_shape)
    assert y.tolist() == [0] * 8
