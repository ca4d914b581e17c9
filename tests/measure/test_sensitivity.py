"""Sensitivity against closed forms: on a quadratic E[C(w + θ)] = C(w) + ½·Var·tr H, whatever the point."""

import json
import math
import statistics

import numpy as np
import pytest
import torch
from networks import Function, accuracy, batches, cross_entropy, mlp, trained, value_of
from torch import nn

from interpreter import python
from smoothout import AdaSmoothOut, Noise, SmoothOut, measure
from smoothout.measure import Sensitivity
from smoothout.measure._sensitivity import mean_of_rows
from smoothout.select import not_normalisation

CURVATURES = torch.linspace(0.5, 3.0, 200, dtype=torch.float64)
CENTRE = torch.linspace(-1, 1, 200, dtype=torch.float64)


def bowl(at_minimum=False):
    """½ Σ hᵢ(wᵢ − cᵢ)², at its minimum or off it."""
    start = CENTRE if at_minimum else torch.zeros(200)
    return Function(lambda w: 0.5 * (CURVATURES * (w - CENTRE) ** 2).sum(), start)


@pytest.mark.parametrize(("noise", "variance"), [("uniform", 1 / 3), ("gaussian", 1.0), ("rademacher", 1.0)])
@pytest.mark.parametrize("at_minimum", [True, False])
def test_a_quadratic_rises_by_half_the_variance_times_the_trace(noise, variance, at_minimum):
    model = bowl(at_minimum)
    strengths = [0.0, 0.05, 0.1, 0.3]
    curve = measure.sensitivity(model, value_of, [0], strengths, noise=noise, draws=400)
    base = model().item()
    for a, loss, spread, error in zip(strengths, curve.losses, curve.spreads, curve.standard_errors):
        exact = base + a**2 * variance / 2 * CURVATURES.sum().item()
        assert error == pytest.approx(spread / 20)
        # Rademacher noise at the minimum has no spread at all: the rounding of fp32 noise remains.
        assert abs(loss - exact) <= 4 * error + 1e-6 * a**2 * exact
    assert (curve.losses[0], curve.spreads[0]) == (base, 0.0)  # exactly


def test_the_error_bar_is_not_too_wide_either():
    """Over many seeds two thirds of the means lie within one standard error."""
    exact = bowl()().item() + 0.1**2 / 6 * CURVATURES.sum().item()
    curves = [measure.sensitivity(bowl(), value_of, [0], [0.1], draws=20, seed=s) for s in range(60)]
    within = [abs(c.losses[0] - exact) <= c.standard_errors[0] for c in curves]
    assert 0.5 < np.mean(within) < 0.82


def test_low_pass():
    """E[cos k(w + θ)] = cos(kw)·sin(ka)/(ka) for U(−a, a)."""
    w = torch.full((4000,), 0.3)
    curve = measure.sensitivity(Function(lambda w: torch.cos(5 * w).mean(), w), value_of, [0], [0.4], draws=25)
    assert abs(curve.losses[0] - math.cos(1.5) * math.sin(2.0) / 2.0) <= 4 * curve.standard_errors[0]


def test_the_same_raw_draw_for_every_strength_and_model():
    """The slope of a linear function along one draw is the same at every strength; two models see the same θ."""
    linear = Function(lambda w: w.sum(), torch.zeros(50))
    curve = measure.sensitivity(linear, value_of, [0], [0.1, 0.2, 0.4])
    assert curve.losses[1] == pytest.approx(2 * curve.losses[0], rel=1e-12)
    assert curve.losses[2] == pytest.approx(4 * curve.losses[0], rel=1e-12)
    assert curve.slope == pytest.approx(curve.losses[0] / 0.1)
    shifted = Function(lambda w: w.sum() + 7, torch.ones(50))
    assert measure.sensitivity(shifted, value_of, [0], [0.1]).losses[0] == pytest.approx(curve.losses[0] + 57)
    assert measure.sensitivity(linear, value_of, [0], [0.1], seed=1).losses[0] != curve.losses[0]


@pytest.mark.parametrize(("scale", "method"), [("absolute", SmoothOut), ("filter", AdaSmoothOut)])
def test_the_noise_has_the_law_of_training_but_other_numbers(scale, method):
    """Filter noise has the norm that AdaSmoothOut gives it; no draw is one that training with this seed makes."""
    model = nn.Linear(40, 3, bias=False)
    seen = []

    def record(model, batch):
        seen.append(model.weight.detach().clone())
        return model.weight.sum()

    measure.sensitivity(model, record, [0], [0.2], scale=scale, draws=3)
    noise = [w - model.weight.detach() for w in seen[1:]]
    assert len(noise) == 3
    smooth = method(model, 0.2)
    for _ in range(3):
        with smooth.perturbed():
            trained_with = model.weight.detach().clone()
        assert all((w - trained_with).abs().max() > 0.01 for w in seen[1:])
    for θ in noise:
        if scale == "filter":
            torch.testing.assert_close(θ.norm(dim=1), 0.2 * model.weight.detach().norm(dim=1), rtol=1e-5, atol=0)
        else:
            assert θ.abs().max() <= 0.2 * (1 + 1e-5)
            assert torch.stack(noise).abs().max() > 0.19  # of 360 values


def test_fresh_noise_is_none_that_training_draws():
    model, seen = nn.Linear(40, 3, bias=False), []

    def record(model, batch):
        seen.append(model.weight.detach().clone())
        return model.weight.sum()

    measure.sensitivity(model, record, range(4), [0.2], fresh_noise_per_batch=True)
    smooth = SmoothOut(model, 0.2, shared_noise=True)
    for _ in range(4):
        with smooth.perturbed():
            assert all((w - model.weight).abs().max() > 0.01 for w in seen)


def test_mean_and_spread_are_those_of_the_draws():
    seen = []

    def record(model, batch):
        seen.append(model().item())
        return model()

    curve = measure.sensitivity(bowl(), record, [0], [0.1], draws=4)
    assert curve.losses == pytest.approx((statistics.fmean(seen[1:]),), rel=1e-12)
    assert curve.spreads == pytest.approx((statistics.stdev(seen[1:]),), rel=1e-9)


def test_the_mean_of_equal_losses_is_that_loss_beside_infinite_ones_too():
    rows = np.array([[0.1, 1.0, math.inf, math.nan], [0.1, 2.0, 1.0, 1.0], [0.1, 6.0, 1.0, 1.0]])
    assert mean_of_rows(rows)[:3].tolist() == [0.1, 3.0, math.inf]
    assert math.isnan(mean_of_rows(rows)[3])


def test_fresh_noise_per_batch():
    """One θ for all batches by default; the paper's protocol has one for each, the same ones at every strength."""
    seen = []

    def record(model, batch):
        seen.append(model.w.detach().clone())
        return model() * 0

    model = Function(lambda w: w.sum(), torch.zeros(6))
    measure.sensitivity(model, record, [0, 1, 2], [0.1])
    assert all(torch.equal(w, seen[3]) for w in seen[3:])
    seen.clear()
    measure.sensitivity(model, record, [0, 1, 2], [0.1, 0.2], fresh_noise_per_batch=True, draws=2)
    noise = torch.stack(seen[3:]).view(2, 2, 3, 6)  # draw, strength, batch
    assert len({tuple(θ.tolist()) for θ in noise.view(-1, 6)}) == 12
    torch.testing.assert_close(2 * noise[:, 0], noise[:, 1])


def test_fresh_noise_needs_fewer_draws_for_the_same_error():
    data = list(range(16))
    once = measure.sensitivity(bowl(), value_of, data, [0.2], draws=40)
    fresh = measure.sensitivity(bowl(), value_of, data, [0.2], draws=40, fresh_noise_per_batch=True)
    assert fresh.spreads[0] < once.spreads[0] / 2
    exact = bowl()().item() + 0.2**2 / 6 * CURVATURES.sum().item()
    assert abs(fresh.losses[0] - exact) <= 4 * fresh.standard_errors[0]


def test_rescaling_a_filter_moves_the_absolute_curve_and_not_the_relative_one():
    def networks():
        for factor in (1, 10):
            model = trained(mlp(), batches()).double()
            model[1].eps = 1e-14
            with torch.no_grad():
                for tensor, power in (
                    (model[0].weight, 1),
                    (model[0].bias, 1),
                    (model[1].running_mean, 1),
                    (model[1].running_var, 2),
                ):
                    tensor[2] *= factor**power
            yield model

    data = [(x.double(), y) for x, y in batches()]
    curves = {
        scale: [measure.sensitivity(m, cross_entropy, data, [0.1, 0.3], scale=scale, draws=3) for m in networks()]
        for scale in ("absolute", "filter")
    }
    before, after = curves["filter"]
    assert after.losses == pytest.approx(before.losses, rel=1e-6)  # the noise is drawn in fp32
    before, after = curves["absolute"]
    assert abs(after.losses[1] / before.losses[1] - 1) > 1e-3


def test_slope_is_least_squares_over_the_grid():
    a = [0.0, 0.1, 0.25, 0.7]
    curve = measure.sensitivity(bowl(), value_of, [0], a, draws=3)
    assert curve.slope == pytest.approx(np.polyfit(a, curve.losses, 1)[0])
    assert math.isnan(measure.sensitivity(bowl(), value_of, [0], [0.1]).slope)
    assert math.isnan(measure.sensitivity(bowl(), value_of, [0], [0.1] * 3).slope)  # whose mean is not 0.1


@pytest.mark.filterwarnings("error")
def test_infinite_losses_have_no_spread_and_no_finite_slope():
    overflowing = Function(lambda w: (1e4 * w.abs().sum()).exp(), torch.zeros(3))
    curve = measure.sensitivity(overflowing, value_of, [0], [0.0, 1.0, 2.0], draws=2)
    assert curve.losses == (1.0, math.inf, math.inf)
    assert math.isnan(curve.spreads[1])
    assert not math.isfinite(curve.slope)


def test_accuracies():
    data = batches()
    model = trained(mlp(), data).eval()
    curve = measure.sensitivity(model, cross_entropy, data, [0.0, 5.0], accuracy_fn=accuracy, draws=4)
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in data)
    assert curve.accuracies[0] == pytest.approx(right / sum(len(y) for _, y in data))
    assert curve.accuracies[1] < curve.accuracies[0]
    assert measure.sensitivity(model, cross_entropy, data, [0.0]).accuracies is None
    assert measure.sensitivity(model, cross_entropy, data, [0.0], accuracy_fn=lambda m, b: None).accuracies is None


def test_batchnorm_is_perturbed_unless_select_says_otherwise():
    model = nn.Sequential(nn.BatchNorm1d(3))
    loss = lambda m, b: m[0].weight.sum()  # noqa: E731
    assert measure.sensitivity(model, loss, [0], [0.5]).losses[0] != 3.0
    with pytest.raises(ValueError, match="nothing to measure"):
        measure.sensitivity(model, loss, [0], [0.5], select=not_normalisation)


class OnlyTheFirst:
    """A noise of one's own."""

    def draw(self, parameter, generator):
        θ = torch.zeros_like(parameter, dtype=torch.float32)
        θ.view(-1)[0] = 1.0
        return θ


def test_any_noise():
    assert isinstance(OnlyTheFirst(), Noise)
    curve = measure.sensitivity(Function(lambda w: w.sum(), torch.zeros(9)), value_of, [0], [0.5], noise=OnlyTheFirst())
    assert curve.losses[0] == 0.5


def test_progress_and_json():
    told = []
    curve = measure.sensitivity(bowl(), value_of, [0], [0.1, 0.2], draws=2, progress=lambda *p: told.append(p))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert Sensitivity.from_json(json.loads(json.dumps(curve.to_json()))) == curve
    one = measure.sensitivity(bowl(), value_of, [0], [0.1])
    record = json.loads(json.dumps(one.to_json(), allow_nan=False))
    assert math.isnan(Sensitivity.from_json(record).spreads[0])
    endless = Sensitivity((0.1,), (math.inf,), (0.0,), None, -math.inf)
    assert Sensitivity.from_json(json.loads(json.dumps(endless.to_json(), allow_nan=False))) == endless


@pytest.mark.parametrize(
    ("strengths", "options", "words"),
    [
        ([], {}, "strengths is empty"),
        ([0.1, -0.1], {}, "strength=-0.1"),
        ([math.nan], {}, "strength=nan"),
        ([0.1], {"draws": 0}, "draws=0"),
        ([0.1], {"noise": "pink"}, "noise='pink'"),
        ([0.1], {"scale": "layer"}, "scale='layer'"),
    ],
)
def test_bad_options_are_named(strengths, options, words):
    with pytest.raises(ValueError, match=words):
        measure.sensitivity(bowl(), value_of, [0], strengths, **options)


@pytest.mark.parametrize("strengths", [0.1, "0.1", ["a"], [None], torch.tensor(0.1)])
def test_strengths_are_a_list_of_numbers(strengths):
    with pytest.raises(TypeError, match=r"strengths=.*: give a list of numbers, such as \[0.0, 0.01, 0.02\]"):
        measure.sensitivity(bowl(), value_of, [0], strengths)


def test_numbers_of_numpy():
    found = measure.sensitivity(bowl(), value_of, [0], np.array([0.25, 0.5]), draws=np.int64(2), seed=np.int64(3))
    assert found == measure.sensitivity(bowl(), value_of, [0], [0.25, 0.5], draws=2, seed=3)
    json.dumps(found.to_json())


def test_the_compiler_is_not_loaded():
    """That takes a second or two."""
    python(
        "-c",
        "import sys, torch; from smoothout import measure; loss = lambda model, x: model(x).square().mean(); "
        "measure.sensitivity(torch.nn.Linear(2, 2), loss, [torch.ones(3, 2)], [0.1]); "
        "assert 'torch._dynamo' not in sys.modules",
    )
