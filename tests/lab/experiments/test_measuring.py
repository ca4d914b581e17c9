"""A measurement counts only if it was made as it is wanted."""

import pytest

from smoothout.lab.experiments.measuring import sensitivity, sharpness
from smoothout.lab.experiments.vocabulary import Setting

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
    assert WANTED.is_answered_by({**dict(WANTED.settings), **change}, 60_000) == answers


def test_lists_of_json_and_the_number_of_images():
    wanted = sensitivity(Setting(), "resnet44")
    how = {name: list(value) if isinstance(value, tuple) else value for name, value in wanted.settings}
    assert wanted.is_answered_by({**how, "images": 10_000}, 50_000)
    assert not wanted.is_answered_by({**how, "images": 50_000}, 50_000)
    assert not wanted.is_answered_by({**how, "strengths": [0.0, 0.1]}, 50_000)
