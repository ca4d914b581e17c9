"""What is said of a run before it begins."""

from types import SimpleNamespace

import pytest

from smoothout.lab.cli.introduction import Introduction
from smoothout.lab.config import resolve

CIFAR10 = SimpleNamespace(train=range(50_000))


def introduced(**settings):
    return Introduction({})(resolve(**settings), CIFAR10)


@pytest.mark.parametrize(("columns", "widest"), [("60", 60), ("300", 100)])
def test_no_line_is_wider_than_the_terminal_or_100_columns(monkeypatch, columns, widest):
    monkeypatch.setenv("COLUMNS", columns)
    said = introduced(dataset="cifar10", model="resnet44", method="adasmoothout", batch_size=2048, epochs=400)
    lengths = [len(line) for line in said.splitlines()]
    assert widest - 20 < max(lengths) <= widest
    assert all(line.startswith(("  - ", "    ")) for line in said[said.index("  - ") :].splitlines())


def test_what_reproduce_would_take_here_is_named(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    chosen = "  - `smoothout reproduce --preset ours` has {} here, chosen on held-out images"
    assert chosen.format("strength 0.15") in introduced(dataset="cifar10", batch_size=256)
    both = introduced(dataset="mnist", batch_size=256, method="adasmoothout", strength_schedule="linear")
    assert chosen.format("strength 0.6, strength schedule constant") in both.replace("\n    ", " ")


@pytest.mark.parametrize(
    "settings",
    [
        {"dataset": "cifar10", "batch_size": 256, "strength": 0.15},  # the same
        {"dataset": "cifar10", "batch_size": 256, "preset": "paper"},
        {"dataset": "cifar10", "batch_size": 512},
        {"dataset": "digits", "model": "c1", "batch_size": 256},
        {"dataset": "cifar10", "batch_size": 256, "method": "plain"},
    ],
)
def test_where_it_would_take_nothing_else_nothing_is_named(settings):
    assert "chosen on held-out images" not in introduced(**settings)


def test_where_noise_is_not_as_usual_is_said(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    usual, too = introduced(model="f1"), introduced(model="f1", perturb_bn=True)
    alone = introduced(model="f1", perturb_bn=True, perturb_weights=False)
    assert "on normalisation layers, too," in too.splitlines()[0]
    assert "on normalisation layers alone," in alone.splitlines()[0]
    assert "on normalisation layers" not in usual.splitlines()[0]
    assert "no noise" not in too


def test_later_seeds_are_told_apart():
    introduce, config = Introduction({}), resolve(model="mlp")
    assert introduce(config, CIFAR10).startswith("mlp on digits: smoothout")
    assert introduce(config.with_seed(1), CIFAR10) == "seed 1"
