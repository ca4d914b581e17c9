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
def test_random_starts_find_what_the_centre_and_the_vertices_do_not_show(method):
    """A hill between them on a plain; starts on the plain make no move."""
    at = in_the_box(lambda z: 5 + (1 - ((z[0] - 0.5) / 0.2) ** 2).clamp_min(0), 1)
    found = sharpness_at(at, method=method, restarts=20)
    assert found.value == pytest.approx(100 / 6, rel=1e-3)
    assert 0 < len(found.trials) < 10
    assert found.converged
    assert found.message.startswith({"lbfgsb": "L-BFGS-B", "ascent": "ascent"}[method])  # of the best start


@pytest.mark.parametrize("method", METHODS)
def test_an_infinite_loss_that_only_the_lower_starts_meet_is_told_too(method):
    """Some begin in it, some are led into it by the first coordinate, the others to the maximum on the other side."""

    def loss(z):
        return 5 + 3 * z[0].abs() + z[1:].sum() + torch.where(z[0] < -0.5, math.inf, 0.0)

    found = sharpness_at(in_the_box(loss, 40), method=method, restarts=20)
    assert found.value == pytest.approx(100 * 42 / 6)
    assert (found.status, found.message) == ("failed", "the loss is inf at a point of the box")
    assert 0 < len(found.trials) < 20
    assert all(0 < trial <= found.value for trial in found.trials)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("restarts", [1, 5])
@pytest.mark.parametrize("plain", [0.0, 1.0])
def test_a_plain_with_nan_around_it_is_a_failure_and_not_flat(plain, restarts, method):
    """No start can move: where the gradient is zero, random vertices are tried, and they are NaN."""
    at = in_the_box(lambda z: (0.0 if not z.any() or z.abs().max() < plain else math.nan) * z.sum() + 5, 3)
    found = sharpness_at(at, method=method, restarts=restarts)
    assert math.isnan(found.value)
    assert (found.status, found.message) == ("failed", "the loss is nan at a point of the box")
