"""What holds for every measurement alike: modes, what is selected, seeds."""

import pytest
import torch
from networks import MEASUREMENTS, batches, cross_entropy, mlp

from smoothout import measure


@pytest.mark.parametrize("name", [n for n in MEASUREMENTS if n != "recomputed"])
def test_eval_mode_unless_asked_otherwise(name):
    seen = set()

    def loss(model, batch):
        seen.update(m.training for m in model.modules())
        return cross_entropy(model, batch)

    model, data = mlp().train(), batches()
    MEASUREMENTS[name](model, loss, data)
    assert seen == {False}
    seen.clear()
    MEASUREMENTS[name](model.eval(), loss, data, train_mode=True)
    assert seen == {True}


@pytest.mark.parametrize("name", [n for n in MEASUREMENTS if n not in ("interpolate", "recomputed", "curvature")])
def test_only_what_is_selected_moves(name):
    seen = {"0.weight": set(), "4.weight": set()}

    def loss(model, batch):
        for key, values in seen.items():
            values.add(model.get_parameter(key).sum().item())
        return cross_entropy(model, batch)

    MEASUREMENTS[name](mlp(), loss, batches(), select=lambda name, parameter, module: name[0] != "0")
    assert len(seen["0.weight"]) == 1
    assert len(seen["4.weight"]) > 1


@pytest.mark.parametrize("name", MEASUREMENTS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_works_under_no_grad_and_inference_mode(name, mode):
    model, data = mlp(), batches()
    expected = MEASUREMENTS[name](model, cross_entropy, data).to_json()
    with mode():
        assert MEASUREMENTS[name](model, cross_entropy, data).to_json() == expected


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_generators_are_private_and_seeded(name):
    def measured(of_torch, **seed):
        model = mlp()
        torch.manual_seed(of_torch)
        return MEASUREMENTS[name](model, cross_entropy, batches(), **seed).to_json()

    assert measured(1) == measured(2)
    if name not in (
        "interpolate",
        "recomputed",
        "sharpness",
        "sharpness by ascent",
    ):  # all starts find one maximum here
        assert measured(1) == measured(1, seed=0) != measured(1, seed=1)


@pytest.mark.parametrize("name", ["sharpness", "curvature", "sensitivity", "landscape"])
def test_a_default_device_is_not_where_numbers_are_drawn(name):
    """ "meta" has no numbers at all; users set "cuda"."""
    how = {"sensitivity": {"strengths": [0.0, 0.1]}, "landscape": {"steps": 3}}.get(name, {})
    model, data = mlp(), batches()
    expected = getattr(measure, name)(model, cross_entropy, data, **how)
    with torch.device("meta"):
        found = getattr(measure, name)(model, cross_entropy, data, **how)
    assert found.to_json() == expected.to_json()
