"""The search for the largest loss in a box: where its starts lead, and what is said of those that fail."""

import math

import pytest
import torch

from smoothout.measure._sharpness import sharpness_at
from smoothout.measure.loss_at import FunctionLossAt

METHODS = ["lbfgsb", "ascent"]
EPSILON = 5e-4


def in_the_box(function, n):
    """A function of z in the cube as one of w around 0."""
    return FunctionLossAt(lambda w: function(w / EPSILON), torch.zeros(n))


@pytest.mark.parametrize("method", METHODS)
def test_one_flip_leads_away_from_a_vertex_that_the_gradient_points_to(method):
    """½|z|² − 0.8·z₁z₂ + 0.1·(z₁ + z₂) is 0.4 at (1, 1), where the gradient is positive, and 1.8 at (1, −1)."""

    def loss(z):
        return 5 + 0.5 * z @ z - 0.8 * z.prod() + 0.1 * z.sum()

    found = sharpness_at(in_the_box(loss, 2), method=method, restarts=1)
    assert found.max_loss == pytest.approx(6.8)
    assert found.converged
    assert found.evaluations < 50


@pytest.mark.parametrize("method", METHODS)
def test_the_polish_goes_from_vertex_to_vertex_for_as_long_as_the_loss_rises(method):
    """The first coordinate draws the second to its side, and only there the second draws the third."""
    slopes = torch.full((40,), -0.1, dtype=torch.float64)
    slopes[0] = 10.0

    def loss(z):
        return 5 + 0.05 * z @ z + slopes @ z + 3 * z[0] * z[1] + 1.5 * z[1] * z[2]

    found = sharpness_at(in_the_box(loss, 40), method=method, restarts=1, max_iterations=1)
    assert found.max_loss == pytest.approx(5 + 2 + 10 + 3 + 1.5 + 0.1 * (37 - 2))


@pytest.mark.parametrize("method", METHODS)
def test_random_starts_find_what_the_centre_and_the_vertices_do_not_show(method):
    """A hill between them on a plain; starts on the plain make no move."""
    at = in_the_box(lambda z: 5 + (1 - ((z[0] - 0.5) / 0.2) ** 2).clamp_min(0), 1)
    before = torch.get_rng_state()
    found = sharpness_at(at, method=method, restarts=20)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.value == pytest.approx(100 / 6, rel=1e-3)
    assert 0 < len(found.trials) < 10
    assert found.converged
    assert found.message.startswith({"lbfgsb": "L-BFGS-B", "ascent": "ascent"}[method])  # of the best start


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("first", [torch.abs, torch.clone], ids=["led into it", "begin in it"])
def test_an_infinite_loss_that_only_the_lower_starts_meet_is_told_too(first, method):
    """The others are led to the maximum on the other side."""

    def loss(z):
        return 5 + 3 * first(z[0]) + z[1:].sum() + torch.where(z[0] < -0.5, math.inf, 0.0)

    found = sharpness_at(in_the_box(loss, 40), method=method, restarts=20)
    assert found.value == pytest.approx(100 * 42 / 6)
    assert (found.status, found.message) == ("failed", "the loss is inf at a point of the box")
    assert 0 < len(found.trials) < 20
    assert found.mean == pytest.approx(sum(found.trials) / len(found.trials))
    assert all(0 < trial <= found.value for trial in found.trials)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "finite",
    [
        lambda z: not z.any(),
        lambda z: z.abs().max() < 1,
        lambda z: not z.any() or (z.abs() == 1).all(),  # where the first start goes, and no other begins
    ],
    ids=["at the centre", "inside", "at the centre and the vertices"],
)
def test_a_plain_with_nan_around_it_is_a_failure_and_not_flat(finite, method):
    """No start can move: where the gradient is zero, random vertices are tried."""
    at = in_the_box(lambda z: (0.0 if finite(z) else math.nan) * z.sum() + 5, 3)
    found = sharpness_at(at, method=method, restarts=3)
    assert math.isnan(found.value)
    assert found.status == "failed"
    assert "the loss is nan at a point of the box" in found.message
