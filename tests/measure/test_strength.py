import json
import math

import numpy as np
import pytest
import torch
from networks import Function, batches, cross_entropy, mlp, trained, value_of

import smoothout
from smoothout import SmoothOut, measure
from smoothout.measure import Sensitivity, SuggestedStrength
from smoothout.measure.strength import crossing


@pytest.mark.parametrize(("noise", "variance"), [("uniform", 1 / 3), ("gaussian", 1.0)])
@pytest.mark.parametrize("rise", [0.05, 0.1])
def test_on_a_bowl_the_rule_has_a_closed_form(noise, variance, rise):
    """C̄ − C = ½·a²·Var·tr H = rise·(1 + C)."""
    h = torch.linspace(1, 3, 2000, dtype=torch.float64)
    model = Function(lambda w: 0.5 * (h * w**2).sum() + 0.7, torch.zeros(2000))
    found = smoothout.suggest_strength(model, value_of, [0], noise=noise, rise=rise, draws=10)
    exact = math.sqrt(2 * rise * 1.7 / (variance * h.sum().item()))
    assert float(found) == pytest.approx(exact, rel=0.02)
    assert found.allowed_rise == pytest.approx(rise * 1.7)
    assert found.base_loss == pytest.approx(0.7)
    assert "meets" in found.message


@pytest.mark.parametrize("scale", ["absolute", "filter"])
def test_the_curve_at_the_strength_is_at_the_limit(scale):
    data = batches()
    model = trained(mlp(), data)
    found = smoothout.suggest_strength(model, cross_entropy, data, scale=scale, draws=10)
    assert found.allowed_rise == pytest.approx(0.1 * (1 + found.base_loss))
    assert found.curve.strengths[0] == 0.0
    assert found.curve.strengths[1::24] == pytest.approx((0.001, 4.096))
    assert found.curve.scale == scale
    there = measure.sensitivity(
        model, cross_entropy, data, [found.strength], scale=scale, draws=10, select=smoothout.select.not_normalisation
    )
    assert there.losses[0] - found.base_loss == pytest.approx(found.allowed_rise, rel=0.1)
    assert SmoothOut(model, float(found), scale=scale).strength == found.strength


def test_the_curve_is_that_of_sensitivity_with_the_same_options():
    model, data, told = mlp(dropout=0.5), batches(), []
    options = {
        "noise": "gaussian",
        "draws": 2,
        "seed": 7,
        "train_mode": True,
        "select": lambda name, p, m: name[0] in "01",
    }
    found = smoothout.suggest_strength(
        model, cross_entropy, data, strengths=[0.1, 0.2], progress=lambda *p: told.append(p), **options
    )
    assert found.curve == measure.sensitivity(model, cross_entropy, data, [0.0, 0.1, 0.2], **options)
    assert told == [(i + 1, 6) for i in range(6)]


def test_where_the_curve_crosses():
    assert crossing([1.0, 2.0, 4.0], [0.01, 0.04, 0.16], 0.08)[0] == pytest.approx(2 * math.sqrt(2))
    assert crossing([1.0, 2.0, 4.0], [0.01, 0.02, 0.03], 0.5) == (
        4.0,
        "the largest strength of the grid still raises the loss by less than is allowed",
    )
    assert crossing([1.0, 2.0], [0.9, 2.0], 0.5) == (
        1.0,
        "even the smallest strength of the grid raises the loss by more than is allowed",
    )
    for rises in ([-0.01, 3.0], [0.0, 3.0], [0.1, math.inf], [0.1, math.nan]):
        strength, message = crossing([1.0, 2.0], rises, 0.5)
        assert strength == 1.0
        assert "of the grid" in message
    assert crossing([1.0, 2.0, 4.0, 8.0], [0.1, 0.9, 0.2, 0.9], 0.5)[0] < 2.0  # the first crossing


def test_json_carries_the_curve():
    found = smoothout.suggest_strength(mlp(), cross_entropy, batches(), strengths=[0.1, 0.2])
    assert str(found) == f"strength {found.strength:.4g}: {found.message}"  # one line, without the curve
    again = SuggestedStrength.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found
    with pytest.raises(ValueError, match="of kind 'SuggestedStrength', not 'Sensitivity'"):
        Sensitivity.from_json(found.to_json())


def test_bad_options_are_named():
    for options, words in (
        ({"strengths": [0.1, 0.3, 0.2]}, "strengths"),
        ({"strengths": [0.1, 0.1]}, "strengths"),
        ({"strengths": [0.0, 0.1]}, "strengths"),
        ({"strengths": []}, "strengths"),
        ({"rise": 0}, "rise=0"),
    ):
        with pytest.raises(ValueError, match=words):
            smoothout.suggest_strength(mlp(), cross_entropy, batches(), **options)
    with pytest.raises(ValueError, match="is not above −1 at the start"):
        smoothout.suggest_strength(mlp(), lambda m, b: cross_entropy(m, b) - 9, batches())
    with pytest.raises(TypeError, match=r"strengths=0\.1: give a list of numbers"):
        smoothout.suggest_strength(mlp(), cross_entropy, batches(), strengths=0.1)


def test_numbers_of_numpy():
    found = smoothout.suggest_strength(
        mlp(), cross_entropy, batches(), rise=np.float32(0.5), draws=np.int64(2), strengths=np.array([0.25, 0.5])
    )
    assert found == smoothout.suggest_strength(
        mlp(), cross_entropy, batches(), rise=0.5, draws=2, strengths=[0.25, 0.5]
    )
    json.dumps(found.to_json())
