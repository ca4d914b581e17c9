"""ResNet44 against the one of `benchmarks/without_smoothout.py`, which uses nothing of the package."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from smoothout.lab.models.resnet import cifar_resnet

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_trains_as_one_written_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    other = importlib.import_module("without_smoothout")
    torch.manual_seed(0)
    ours, theirs = cifar_resnet(44), other.resnet44()
    with torch.no_grad():
        for mine, same in zip(ours.parameters(), theirs.parameters(), strict=True):
            same.copy_(mine)
    images, labels = torch.randn(2 * other.GHOSTS, 3, 32, 32), torch.randint(10, (2 * other.GHOSTS,))
    F.cross_entropy(theirs(images), labels).backward()
    for ghost, right in zip(images.chunk(other.GHOSTS), labels.chunk(other.GHOSTS)):
        (F.cross_entropy(ours(ghost), right) / other.GHOSTS).backward()
    for mine, same in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine.grad, same.grad, rtol=1e-3, atol=1e-4 * float(mine.grad.abs().max()))
    for mine, same in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine, same)


@pytest.mark.parametrize(("epochs", "milestones"), [(100, (40, 61, 82)), (400, (162, 244, 328))])
def test_its_rates_are_those_of_the_laboratory(
    monkeypatch: pytest.MonkeyPatch, epochs: int, milestones: tuple[int, ...]
) -> None:
    from smoothout.lab.config import resolve
    from smoothout.lab.train.regime import learning_rate

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    other = importlib.import_module("without_smoothout")
    config = resolve(
        dataset="cifar10", model="resnet44", method="plain", batch_size=other.BATCH, epochs=epochs, lr_warmup=5.0
    )
    assert config.milestones == milestones
    for update in range(0, 25 * epochs, 7):
        ours = learning_rate(config, *divmod(update, 25), 25)
        assert other.rate_at(update, epochs, 25, warm_up=5) == pytest.approx(ours)
