"""Curves that a reader can tell apart, and see."""

import re
from dataclasses import dataclass

import pytest

from smoothout.lab.config import resolve
from smoothout.lab.groups import Group, group_runs
from smoothout.lab.report.figures import line_styles, needs_decades, sensitivity_curves, training_curves
from smoothout.lab.runs import load_run
from smoothout.lab.train.start import Options, train


@dataclass(frozen=True)
class Curve:
    strengths: tuple[float, ...]
    losses: tuple[float, ...]


def test_every_batch_size_has_its_dashes_and_the_largest_none():
    sizes = (16, 128, 512, 718, 900, 1000)
    styles = line_styles([Group(resolve(method="plain", batch_size=size), ()) for size in sizes])
    assert len({str(style["linestyle"]) for style in styles}) == len(sizes)
    assert styles[-1]["linestyle"] == "-"
    assert styles[-2]["linestyle"] == "--"


def _with_epochs(tmp_path, epochs):
    train(resolve(model="mlp", epochs=epochs, batch_size=400), tmp_path, Options(device="cpu", quiet=True))
    return training_curves(group_runs([load_run(tmp_path)]), ["name"], lambda m: m.test_loss, "loss", log=True)


def test_a_single_epoch_is_a_point(tmp_path):
    def markers(svg):  # lines are not filled
        return svg.count("fill: #0072b2")

    one, two = _with_epochs(tmp_path / "one", 1), _with_epochs(tmp_path / "two", 2)
    assert markers(one) > 0
    assert markers(two) == 0


def test_accuracies_fill_the_picture_but_for_the_first_epochs(tmp_path):
    train(resolve(model="mlp", epochs=8, batch_size=400), tmp_path, Options(device="cpu", quiet=True))
    groups = group_runs([load_run(tmp_path)])

    def ticks(*accuracies):
        svg = training_curves(groups, ["name"], lambda m: accuracies[m.epoch - 1], "accuracy, %", log=False)
        return {float(text) for text in re.findall(r">([\d.]+)</text>", svg)}

    at_the_end = ticks(10.0, 20.0, 96.0, 96.5, 97.0, 97.5, 98.0, 98.0)
    assert {96.0, 97.0, 98.0} < at_the_end
    assert not {20.0, 40.0, 60.0, 80.0} & at_the_end
    assert {20.0, 40.0, 60.0, 80.0} < ticks(10.0, 50.0, 96.0, 96.5, 97.0, 97.5, 98.0, 10.0)  # the end is always seen


@pytest.mark.parametrize(("low", "shows_rises"), [(0.3, False), (0.004, True)])
def test_curves_that_lie_decades_apart_are_drawn_in_decades(low, shows_rises):
    groups = [Group(resolve(method="plain", batch_size=size), ()) for size in (16, 718)]
    grid = (0.2, 0.0, 0.1)
    curves = [[Curve(grid, (0.5 + high, 0.5, 0.5 + high / 3))] * 3 for high in (low, 0.4)]
    assert needs_decades(curves) == shows_rises
    svg = sensitivity_curves(groups, ["small", "large"], curves, "a")
    assert ("rise of the loss" in svg) == shows_rises


def test_losses_that_noise_does_not_raise_have_no_decades():
    assert not needs_decades([[Curve((0.0, 0.1), (0.5, 0.4))], [Curve((0.0, 0.1), (0.5, 9.0))]])
