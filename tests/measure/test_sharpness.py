"""Sharpness against closed forms: the maximum of a diagonal quadratic over a box is exact, coordinate by coordinate."""

import itertools
import json
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import Function, batches, cross_entropy, mlp, trained, value_of
from torch import nn

from smoothout import measure
from smoothout.measure import Sharpness
from smoothout.measure._sharpness import random_basis, sharpness_at
from smoothout.measure.loss_at import FunctionLossAt

METHODS = ["lbfgsb", "ascent"]
EPSILON = 5e-4


def bounds(w, epsilon=EPSILON):
    return epsilon * (w.abs() + 1)


def percent(largest, base):
    return 100 * (largest - base) / (1 + base)


def diagonal_quadratic(n, offset, seed=0):
    """½ Σ hᵢ(wᵢ − cᵢ)², w at c or some box widths away from it, and the exact sharpness there."""
    g = torch.Generator().manual_seed(seed)
    c = torch.randn(n, dtype=torch.float64, generator=g)
    h = 10 ** (4 * torch.rand(n, dtype=torch.float64, generator=g) - 2)
    w = c + offset * EPSILON * torch.randn(n, dtype=torch.float64, generator=g)
    at = FunctionLossAt(lambda w: 0.5 * (h * (w - c) ** 2).sum(), w)
    largest = 0.5 * (h * ((w - c).abs() + bounds(w)) ** 2).sum()
    return at, percent(largest.item(), at.loss(w))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("offset", [0.0, 0.3, 1.0, 30.0])
@pytest.mark.parametrize("n", [10, 1000, 30_000])
def test_diagonal_quadratics_at_and_off_their_minimum(n, offset, method):
    check_diagonal_quadratic(n, offset, method, restarts=5)


@pytest.mark.parametrize("offset", [0.0, 0.3, 1.0, 30.0])
def test_diagonal_quadratics_of_a_million_dimensions(offset):
    check_diagonal_quadratic(1_000_000, offset, "ascent", restarts=2)


def test_a_diagonal_quadratic_of_many_dimensions_by_the_slower_method():
    check_diagonal_quadratic(200_000, 1.0, "lbfgsb", restarts=2)


def check_diagonal_quadratic(n, offset, method, restarts):
    at, exact = diagonal_quadratic(n, offset)
    found = sharpness_at(at, method=method, restarts=restarts)
    assert found.value == pytest.approx(exact, rel=1e-3)
    assert found.value <= exact * (1 + 1e-12)
    assert found.status != "failed"


@pytest.mark.parametrize("method", METHODS)
def test_some_coordinates_at_their_minimum_and_some_not(method):
    """A zero gradient leaves a coordinate's direction open; it must not stay in the middle of its box."""
    h = torch.logspace(-2, 2, 40, dtype=torch.float64)
    c = torch.where(torch.arange(40) % 2 == 0, 0.0, 3 * EPSILON).double()
    at = FunctionLossAt(lambda w: 0.5 * (h * (w - c) ** 2).sum(), torch.zeros(40))
    largest = 0.5 * (h * (c.abs() + EPSILON) ** 2).sum().item()
    before = torch.get_rng_state()
    found = sharpness_at(at, method=method, restarts=1)
    assert found.value == pytest.approx(percent(largest, at.loss(at.start)), rel=1e-9)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("offset", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("n", [2, 5, 8, 12])
def test_rotated_quadratics_against_all_vertices(n, offset, method):
    for seed in range(3):
        g = torch.Generator().manual_seed(100 * n + seed)
        rotation = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=g)).Q
        hessian = rotation * (30 * torch.rand(n, dtype=torch.float64, generator=g)) @ rotation.T
        w = torch.randn(n, dtype=torch.float64, generator=g)
        c = w + offset * EPSILON * torch.randn(n, dtype=torch.float64, generator=g)
        at = FunctionLossAt(lambda w, c=c, hessian=hessian: 0.5 * (w - c) @ hessian @ (w - c), w)
        vertices = w - c + torch.tensor(list(itertools.product((-1.0, 1.0), repeat=n)), dtype=torch.float64) * bounds(w)
        largest = 0.5 * ((vertices @ hessian) * vertices).sum(1).max().item()
        # Which vertex is a combinatorial question: the default of 5 starts finds it nineteen times in twenty.
        found = sharpness_at(at, method=method, restarts=20, seed=seed)
        assert found.value == pytest.approx(percent(largest, at.loss(w)), rel=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_a_linear_function_exactly(method):
    g, w = torch.randn(500, dtype=torch.float64), torch.randn(500, dtype=torch.float64)
    at = FunctionLossAt(lambda w: g @ w + 100, w)
    found = sharpness_at(at, method=method)
    assert found.max_loss - found.base_loss == pytest.approx((g.abs() @ bounds(w)).item(), rel=1e-11)
    assert found.converged
    short = sharpness_at(at, method=method, max_iterations=1)
    assert (short.value, short.status) == (found.value, "converged")  # by the gradient: a vertex that it points to


@pytest.mark.parametrize("method", METHODS)
def test_a_constant_function_is_flat_and_converged(method):
    found = sharpness_at(FunctionLossAt(lambda w: 0 * w.sum() + 3, torch.randn(50)), method=method)
    assert (found.value, found.mean, found.status, found.base_loss) == (0.0, 0.0, "converged", 3.0)
    assert "flat" in found.message
    for constant in (0.0, 2.0):
        model = Function(lambda w, constant=constant: torch.tensor(constant), [1.0])
        unconnected = measure.sharpness(model, value_of, [0], method=method)
        assert (unconnected.value, unconnected.status) == (0.0, "converged")


@pytest.mark.parametrize("method", METHODS)
def test_a_maximum_inside_the_box(method):
    """Concave: no vertex is the maximum, which lies a third of the way to one of them."""
    h = torch.linspace(1, 5, 20, dtype=torch.float64)
    w = torch.randn(20, dtype=torch.float64)
    top = w + bounds(w) / 3 * torch.randn(20, dtype=torch.float64).sign()
    at = FunctionLossAt(lambda w: 1 - 0.5 * (h * (w - top) ** 2).sum(), w)
    found = sharpness_at(at, method=method, max_iterations=50)
    assert found.value == pytest.approx(percent(1.0, at.loss(w)), rel=1e-3)
    assert found.converged


@pytest.mark.parametrize("method", METHODS)
def test_at_a_maximum_there_is_no_way_up(method):
    w = torch.randn(20, dtype=torch.float64)
    at = FunctionLossAt(lambda x: 1 - ((x - w) ** 2).sum(), w)
    found = sharpness_at(at, method=method)
    assert found.value == 0.0
    assert found.status != "failed"


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 30), st.sampled_from(METHODS))
def test_coordinate_subspaces_are_never_above_the_whole_space(seed, p, method):
    at, exact = diagonal_quadratic(40, offset=1.0, seed=seed)
    columns = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:p]
    part = sharpness_at(at, basis=torch.eye(40, dtype=torch.float64)[:, columns], method=method)
    assert part.value <= exact * (1 + 1e-9)
    whole = sharpness_at(at, method=method)
    assert part.value <= whole.value * (1 + 1e-3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("p", [1, 7, 200])
def test_the_subspace_value_of_a_linear_function_exactly(p, method):
    g, w = torch.randn(200, dtype=torch.float64), torch.randn(200, dtype=torch.float64)
    a = random_basis(200, p, seed=4, device=w.device)
    torch.testing.assert_close(a.T @ a, torch.eye(p, dtype=torch.float64))
    expected = ((a.T @ g).abs() @ (EPSILON * ((a.T @ w).abs() + 1))).item()
    model = Function(lambda w: g @ w + 50, w)
    found = measure.sharpness(model, value_of, [0], subspace=p, seed=4, method=method)
    assert found.max_loss - found.base_loss == pytest.approx(expected, rel=1e-10)


def test_the_definition_with_another_epsilon_and_the_mean_of_the_trials():
    model = Function(lambda w: (3 * w).sum() + 7, [2.0, -1.0])
    found = measure.sharpness(model, value_of, [0], epsilon=0.01)
    assert found.value == pytest.approx(100 * 3 * 0.01 * (3 + 2) / (1 + 10))
    assert found.mean == pytest.approx(sum(found.trials) / len(found.trials))
    assert len(found.trials) == 5
    assert 5 < found.evaluations < 100


@pytest.mark.parametrize("method", METHODS)
def test_both_methods_agree_on_a_trained_network(method):
    data = batches()
    model = trained(mlp(), data).eval()
    other = "ascent" if method == "lbfgsb" else "lbfgsb"
    options = {"epsilon": 5e-3, "restarts": 5}
    found = measure.sharpness(model, cross_entropy, data, method=method, **options)
    assert found.value > 0
    assert found.value >= 0.99 * measure.sharpness(model, cross_entropy, data, method=other, **options).value
    assert measure.sharpness(model, cross_entropy, data, method=method, **options) == found  # reproducible


def times_ten(model):
    """Dinh's rescaling: a filter that BatchNorm follows, and the statistics with it. The network computes the same."""
    linear, norm = model[0], model[1]
    with torch.no_grad():
        linear.weight[2] *= 10
        linear.bias[2] *= 10
        norm.running_mean[2] *= 10
        norm.running_var[2] *= 100
    return model


@pytest.mark.parametrize("train_mode", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_rescaling_a_filter_moves_the_absolute_sharpness_and_not_the_relative_one(method, train_mode):
    def networks():
        for change in (lambda model: model, times_ten):
            model = trained(mlp(), batches()).double()
            model[1].eps = 1e-14  # without it the rescaling is exact
            yield change(model)

    data = [(x.double(), y) for x, y in batches()]
    options = {"method": method, "train_mode": train_mode, "epsilon": 5e-3}
    absolute = [measure.sharpness(m, cross_entropy, data, **options) for m in networks()]
    relative = [measure.sharpness(m, cross_entropy, data, scale="filter", **options) for m in networks()]
    assert absolute[0].base_loss == pytest.approx(absolute[1].base_loss, rel=1e-12)
    assert relative[1].value == pytest.approx(relative[0].value, rel=1e-9)
    assert abs(absolute[1].value / absolute[0].value - 1) > 0.01


def test_the_relative_box_follows_filter_norms():
    model = nn.Linear(3, 2, dtype=torch.float64)
    norms = torch.linalg.vector_norm(model.weight.detach(), dim=1)
    found = measure.sharpness(model, lambda m, b: m.weight.sum() + m.bias.sum() + 9, [0], scale="filter", epsilon=0.1)
    expected = 0.1 * (3 * norms.sum() + model.bias.detach().abs().sum())
    assert found.max_loss - found.base_loss == pytest.approx(expected.item())


@pytest.mark.filterwarnings("error")  # no word of its rounding either
def test_the_padding_row_of_an_embedding_stays_in_the_relative_box():
    model = nn.Embedding(4, 3, padding_idx=1, dtype=torch.float64)
    with torch.no_grad():
        model.weight[1] = 5.0
    found = measure.sharpness(model, lambda m, b: m.weight[1].sum(), [0], scale="filter")
    assert (found.value, found.status) == (0.0, "converged")


@pytest.mark.parametrize("method", METHODS)
def test_a_failed_solve_is_never_a_bare_zero(method):
    """NaN everywhere but at the start itself."""
    w = torch.ones(5, dtype=torch.float64)
    at = FunctionLossAt(lambda x: x.sum() + torch.where((x == w).all(), 0.0, math.nan), w)
    found = sharpness_at(at, method=method)
    assert found.status == "failed"
    assert math.isnan(found.value)
    assert "nan" in found.message


@pytest.mark.parametrize("method", METHODS)
def test_an_infinite_loss_in_a_part_of_the_box_is_a_failure_too(method):
    at = FunctionLossAt(lambda x: x.sum() + torch.where(x[0] > 4e-4, math.inf, 0.0), torch.zeros(5))
    found = sharpness_at(at, method=method)
    assert found.status == "failed"
    assert found.value != 0.0


@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_that_is_not_finite_is_told_from_such_a_loss(method):
    at = FunctionLossAt(lambda x: x.square().sum().sqrt(), torch.zeros(5))
    found = sharpness_at(at, method=method, restarts=1)
    assert (found.status, found.message) == (
        "failed",
        "the gradient is not finite at a point of the box, where the loss is",
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_of_the_wrong_sign_is_seen_as_a_failure(method):
    """The fault of the released tool: the loss of one sign with the gradient of the other."""

    class WrongSign(FunctionLossAt):
        def loss_and_gradient(self, w):
            loss, gradient = super().loss_and_gradient(w)
            return loss, -gradient

    at = WrongSign(lambda w: w.sum() + 5, torch.zeros(100))
    found = sharpness_at(at, restarts=1, method=method)
    assert found.status == "failed"
    assert math.isnan(found.value)


def test_iteration_limit_is_a_status_of_its_own():
    a = torch.randn(60, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    at = FunctionLossAt(lambda w: 5 - (a @ (w - 1e-4)).pow(2).sum().sqrt(), torch.zeros(60))
    assert sharpness_at(at, restarts=1, max_iterations=2, method="lbfgsb").status == "iteration limit"
    assert sharpness_at(at, restarts=1, max_iterations=2, method="ascent").status == "iteration limit"


def test_weights_too_coarse_for_the_box_are_told():
    """bf16 has no number within 5e-4·(|w| + 1) of most w between 1 and 2, and fp32 has thousands."""

    def measured(dtype, epsilon=EPSILON):
        w = torch.linspace(1, 2, 20).to(dtype)
        return measure.sharpness(Function(lambda w: w.double().sum(), w, dtype), value_of, [0], epsilon=epsilon)

    with pytest.warns(UserWarning, match="narrower than the rounding of 100.0% of the weights"):
        assert measured(torch.bfloat16).status == "failed"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measured(torch.float32).converged
        assert measured(torch.bfloat16, epsilon=0.1).value > 0


def test_weights_too_coarse_for_the_relative_box_are_told():
    """Small ones have room in the absolute box."""
    model = Function(lambda w: w.double().sum(), torch.full((20,), 1e-3), torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure.sharpness(model, value_of, [0])
    with pytest.warns(UserWarning, match="narrower than the rounding of 100.0% of the weights"):
        measure.sharpness(model, value_of, [0], scale="filter")


def test_weights_too_coarse_for_a_subspace_are_told():
    """The box of 3 of 1000 dimensions moves each weight by a fraction of what the box of all dimensions does."""

    def measured(dtype, subspace):
        w = torch.linspace(1, 2, 1000).to(dtype)
        return measure.sharpness(
            Function(lambda w: w.double().sum(), w, dtype), value_of, [0], epsilon=0.01, subspace=subspace
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measured(torch.bfloat16, None)
        measured(torch.float32, 3)
    with pytest.warns(UserWarning, match="narrower than the rounding of [1-9]"):
        measured(torch.bfloat16, 3)


def test_large_problems_go_to_the_ascent(monkeypatch):
    from smoothout.measure import _sharpness

    at, exact = diagonal_quadratic(100, offset=30.0)
    assert sharpness_at(at).message.startswith("L-BFGS-B")
    assert sharpness_at(at, method="ascent").message.startswith("ascent")
    monkeypatch.setattr(_sharpness, "LARGEST_FOR_LBFGSB", 99)
    assert sharpness_at(at).message.startswith("ascent")
    assert sharpness_at(at, method="lbfgsb").message.startswith("L-BFGS-B")
    assert sharpness_at(at).value == pytest.approx(exact, rel=1e-9)


def test_progress_and_json():
    told = []
    model = trained(mlp(), batches())
    found = measure.sharpness(model, cross_entropy, batches(), progress=lambda *p: told.append(p), restarts=3)
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert Sharpness.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epsilon": 0.0}, "epsilon=0.0"),
        ({"epsilon": math.nan}, "epsilon=nan"),
        ({"restarts": 0}, "restarts=0"),
        ({"max_iterations": 2.5}, "max_iterations=2.5"),
        ({"method": "newton"}, "method='newton'"),
        ({"scale": "weight"}, "scale='weight'"),
        ({"subspace": 0}, "subspace=0"),
        ({"subspace": 10**6}, "subspace=1000000"),
        ({"subspace": 3, "scale": "filter"}, "subspace=3"),
        ({"seed": 2**70}, f"seed={2**70}: give a whole number of 64 bits"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        measure.sharpness(mlp(), cross_entropy, batches(), **options)


def test_a_loss_that_is_not_finite_at_the_start_is_refused():
    with pytest.raises(ValueError, match="the loss at the start is not finite: the loss is inf"):
        sharpness_at(FunctionLossAt(lambda w: 1 / w.abs().sum(), torch.zeros(2)))


@pytest.mark.parametrize("base", [-1.0, -5.0])
def test_a_loss_whose_unit_is_not_positive_is_refused(base):
    with pytest.raises(ValueError, match=f"f = {base:g} is not above −1 at the start"):
        sharpness_at(FunctionLossAt(lambda w: w.sum() + base, torch.zeros(2)))


def test_a_seed_is_a_number():
    with pytest.raises(TypeError, match="seed='a': give a whole number of 64 bits"):
        measure.sharpness(mlp(), cross_entropy, batches(), seed="a")


def test_numbers_of_numpy():
    whole = {"restarts": 2, "max_iterations": 3, "subspace": 4, "seed": 5}
    found, expected = (
        measure.sharpness(mlp(), cross_entropy, batches(), epsilon=ε, **{k: kind(v) for k, v in whole.items()})
        for kind, ε in ((np.int64, np.float32(2**-11)), (int, 2**-11))
    )
    assert found == expected
