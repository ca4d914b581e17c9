"""The law of the noise: moments, bounds, independence, in every dtype; and what the theorems say of it."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from smoothout import Bernoulli, Gaussian, Rademacher, SmoothOut, Uniform

N = 400_000
LAWS = [(Uniform(), 0.0, 1 / 3), (Gaussian(), 0.0, 1.0), (Rademacher(), 0.0, 1.0), (Bernoulli(0.2), -0.2, 0.16)]


def within(estimate, expected, standard_error, sigmas=5.0):
    assert abs(estimate - expected) < sigmas * standard_error, (estimate, expected, standard_error)


@pytest.mark.parametrize(("noise", "mean", "variance"), LAWS, ids=str)
def test_mean_and_variance_also_of_every_lane(noise, mean, variance):
    """Four values come out of one 64-bit word on a CPU: each of the four must have the law."""
    values = noise.draw(torch.empty(N), torch.Generator().manual_seed(1)).double()
    for part in (values, *(values[lane::4] for lane in range(4)), values[: N // 2], values[N // 2 :]):
        n = part.numel()
        fourth = ((part - mean) ** 4).mean().item()
        within(part.mean().item(), mean, math.sqrt(variance / n))
        within((part - mean).square().mean().item(), variance, math.sqrt(max(fourth - variance**2, 1e-9) / n))
    lanes = torch.stack([values[lane::4] for lane in range(4)])
    correlation = torch.corrcoef(lanes) - torch.eye(4)
    assert correlation.abs().max() < 5 / math.sqrt(N / 4)
    serial = torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1].item()
    within(serial, 0.0, 1 / math.sqrt(N))


def test_uniform_is_uniform_inside_its_bounds():
    values = Uniform().draw(torch.empty(N), torch.Generator().manual_seed(2)).double()
    assert -1 < values.min() < -0.9999
    assert 0.9999 < values.max() < 1
    steps = torch.linspace(0, 1, N, dtype=torch.float64)
    distance = ((values.sort().values + 1) / 2 - steps).abs().max().item()
    assert distance * math.sqrt(N) < 1.95  # Kolmogorov–Smirnov at 0.1 %


def test_what_is_made_of_integers_is_symmetric_to_the_last_bit():
    integers, half = torch.tensor([-(2**15), -1, 0, 2**15 - 1], dtype=torch.int16), 2.0**-16
    for noise, expected in ((Uniform(), [half - 1, -half, half, 1 - half]), (Rademacher(), [-1.0, -1.0, 1.0, 1.0])):
        noise.make(integers, out := torch.empty(4))
        assert out.tolist() == expected


def test_a_probability_may_be_0_or_1():
    for p in (0, 1):
        assert (Bernoulli(p).draw(torch.empty(100), torch.Generator()) == -p).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("noise", "variance"), [("uniform", 1 / 3), ("gaussian", 1.0)])
def test_the_law_holds_in_every_dtype(dtype, noise, variance):
    """θ is rounded once, with w: at w = 1 the realised θ has the mean and variance of the law to rounding noise."""
    model = nn.Linear(600, 600, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    a = 0.05
    with SmoothOut(model, a, noise=noise).perturbed():
        theta = (model.weight.double() - 1).flatten().detach()
    rounding = torch.finfo(dtype).eps ** 2 / 12  # of one rounding at most, as an extra variance
    n = theta.numel()
    within(theta.mean().item(), 0.0, math.sqrt((a * a * variance + rounding) / n))
    within(theta.var().item(), a * a * variance, rounding + a * a * math.sqrt(2 * variance**2 / n))


def test_small_noise_on_bfloat16_is_unbiased_though_each_weight_is_rounded():
    """θ of half a unit in the last place: rounding θ first would lose it, rounding the sum once keeps its mean."""
    model = nn.Linear(700, 700, bias=False).to(torch.bfloat16)
    nn.init.constant_(model.weight, 1.5)
    spacing = 2.0**-7
    with SmoothOut(model, spacing).perturbed():
        moved = (model.weight.double() - 1.5).detach() / spacing
    shares = [(moved == k).double().mean().item() for k in (-1, 0, 1)]
    for share, expected in zip(shares, (0.25, 0.5, 0.25)):
        within(share, expected, math.sqrt(0.25 / moved.numel()))


class Quadratic(nn.Module):
    """C(w) = ½ Σ hᵢ (wᵢ − cᵢ)²."""

    def __init__(self, m, seed=0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.h = torch.rand(m, generator=g, dtype=torch.float64) * 3
        self.c = torch.randn(m, generator=g, dtype=torch.float64)
        self.w = nn.Parameter(torch.randn(m, generator=g, dtype=torch.float64))

    def forward(self):
        return 0.5 * (self.h * (self.w - self.c) ** 2).sum()


@pytest.mark.parametrize(("noise", "factor"), [("uniform", 1 / 6), ("gaussian", 1 / 2), ("rademacher", 1 / 2)])
def test_the_mean_loss_of_a_quadratic_is_its_closed_form(noise, factor):
    """E[C(w + θ)] = C(w) + (a²/6)·tr H for U(−a, a), + (a²/2)·tr H for unit variance."""
    model, a = Quadratic(40), 0.4
    smooth = SmoothOut(model, a, noise=noise)
    losses = []
    for _ in range(4000):
        with smooth.perturbed(), torch.no_grad():
            losses.append(model())
    losses = torch.stack(losses)
    expected = model().item() + factor * a * a * model.h.sum().item()
    within(losses.mean().item(), expected, (losses.std() / math.sqrt(len(losses))).item(), sigmas=4)


def smoothed(function, w, a, noise, draws=20_000):
    """C̄(w) of a function of one variable and its standard error: one weight is one draw."""
    model = nn.Linear(draws, 1, bias=False).double()
    nn.init.constant_(model.weight, w)
    with SmoothOut(model, a, noise=noise).perturbed(), torch.no_grad():
        values = function(model.weight)
    return values.mean().item(), (values.std() / math.sqrt(draws)).item()


@pytest.mark.parametrize(("k", "a", "w"), [(1.0, 0.5, 0.3), (4.5, 1.0, 0.1), (20.0, 0.3, 0.0)])
def test_low_pass_view(k, a, w):
    """E[cos k(w+θ)] = cos(kw)·sin(ka)/(ka) for U(−a, a), ·exp(−a²k²/2) for N(0, a²)."""
    for noise, gain in (("uniform", math.sin(k * a) / (k * a)), ("gaussian", math.exp(-((a * k) ** 2) / 2))):
        mean, error = smoothed(lambda x: torch.cos(k * x), w, a, noise)
        within(mean, math.cos(k * w) * gain, error)


def test_theorem_1_gives_a_stationary_point_not_always_a_minimum():
    """C̄ is stationary at a symmetric minimum; with C convex on the box it is a minimum, for −cos 4.5w a maximum."""
    draws, a = 200_000, 1.0
    model = nn.Linear(draws, 1, bias=False).double()

    def slope_and_curvature(gradient, curvature):
        model.weight.data.zero_()
        with SmoothOut(model, a).perturbed(), torch.no_grad():
            slopes, curvatures = gradient(model.weight), curvature(model.weight)
        within(slopes.mean().item(), 0.0, (slopes.std() / math.sqrt(draws)).item())
        return curvatures.mean().item(), (curvatures.std() / math.sqrt(draws)).item()

    convex, error = slope_and_curvature(lambda w: 4 * w**3, lambda w: 12 * w**2)  # C = w⁴
    assert convex > 10 * error
    cosine, error = slope_and_curvature(lambda w: 4.5 * torch.sin(4.5 * w), lambda w: 4.5**2 * torch.cos(4.5 * w))
    assert cosine < -10 * error  # the minimum of C has become a maximum of C̄
    within(cosine, 4.5**2 * math.sin(4.5) / 4.5, error)


@pytest.mark.parametrize("m", [1, 3, 100])
def test_theorem_2_in_the_max_norm(m):
    """For C = ‖w − w_s‖_∞, C̄(w_s) = a·m/(m + 1): it tends to a, as the theorem says, with growing dimension."""
    a, draws = 0.3, 4000
    model = nn.Linear(m, draws, bias=False).double()
    nn.init.zeros_(model.weight)
    with SmoothOut(model, a).perturbed(), torch.no_grad():
        losses = model.weight.abs().amax(1)
    within(losses.mean().item(), a * m / (m + 1), (losses.std() / math.sqrt(draws)).item())


def test_theorem_2_fails_on_a_quadratic_beyond_a_over_root_three():
    """C = ½h‖w‖²: C̄(w_s) = h·m·a²/6, and max over |wᵢ| ≤ ε is h·m·ε²/2: the constraint holds for ε ≤ a/√3 only."""
    m, draws, a, h = 500, 400, 0.3, 2.0
    model = nn.Linear(m, draws, bias=False).double()
    nn.init.zeros_(model.weight)
    with SmoothOut(model, a).perturbed(), torch.no_grad():
        losses = 0.5 * h * model.weight.square().sum(1)
    smoothed_minimum, error = losses.mean().item(), (losses.std() / math.sqrt(draws)).item()
    within(smoothed_minimum, h * m * a * a / 6, error)

    def maximum(epsilon):
        return 0.5 * h * m * epsilon**2

    assert smoothed_minimum - 5 * error > maximum(0.98 * a / math.sqrt(3))
    assert smoothed_minimum + 5 * error < maximum(1.02 * a / math.sqrt(3))


@pytest.mark.parametrize(
    ("p", "error"), [("x", TypeError), (None, TypeError), (1.5, ValueError), (math.nan, ValueError)]
)
def test_the_probability_of_bernoulli_is_a_number_from_0_to_1(p, error):
    with pytest.raises(error, match=r"Bernoulli\(p=.*\): p is a probability"):
        Bernoulli(p)


def test_a_probability_of_numpy():
    assert repr(Bernoulli(np.float32(0.25))) == "Bernoulli(p=0.25)"
