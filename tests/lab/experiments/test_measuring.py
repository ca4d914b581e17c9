"""A measurement counts only if it was made as it is wanted."""

import pytest

from smoothout.lab.config import resolve
from smoothout.lab.experiments.measuring import line, sensitivity, sharpness
from smoothout.lab.experiments.vocabulary import Setting
from smoothout.lab.measurements import Measurement
from smoothout.measure import Interpolation

WANTED = sharpness(Setting())


@pytest.mark.parametrize(
    ("change", "answers"),
    [
        ({}, True),
        ({"seed": 0, "images": 60_000, "weights": "last"}, True),
        ({"method": "lbfgsb"}, False),
        ({"epsilon": 1e-3}, False),
        ({"weights": "best"}, False),
        ({"scale": "filter"}, False),  # a setting that is not named is wanted at its default
        ({"images": 100}, False),
    ],
)
def test_settings_must_be_the_same(change, answers):
    there = Measurement("sharpness-train", None, {**dict(WANTED.settings), **change})
    assert WANTED.is_answered_by(there, 60_000) == answers


def test_lists_of_json_and_the_number_of_images():
    wanted = sensitivity(Setting(), "resnet44")
    how = {name: list(value) if isinstance(value, tuple) else value for name, value in wanted.settings}

    def answers(**change):
        return wanted.is_answered_by(Measurement("sensitivity-train", None, {**how, **change}), 50_000)

    assert answers(images=10_000)
    assert not answers(images=50_000)
    assert not answers()  # made on all
    assert not answers(images=10_000, strengths=[0.0, 0.1])
    assert not answers(images=10_000, noise="gaussian")
    assert not answers(images=10_000, fresh_noise_per_batch=True)


def test_a_line_must_have_the_same_points():
    config = resolve(dataset="digits", model="mlp")
    wanted = line(Setting(scale="tiny"), config, config.with_seed(1), "train")

    def answers(alphas=wanted.alphas, **how):
        there = Measurement(wanted.name_for(0), Interpolation(alphas, alphas, None), {"images": 200, **how})
        return wanted.is_answered_by(there, 1437)

    assert answers()
    assert not answers((0.0, 1.0))
    assert not answers(batchnorm="recompute")
    assert not answers(images=5)
