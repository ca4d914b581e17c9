import json

import numpy as np
import pytest
import torch
from networks import Function, batches, cross_entropy, mlp, trained, value_of
from torch import nn

from smoothout import measure
from smoothout.measure import Curvature
from smoothout.measure._curvature import curvature_at
from smoothout.measure.loss_at import FunctionLossAt


def dense_hessian(model, data):
    parameters = dict(model.named_parameters())
    sizes = [p.numel() for p in parameters.values()]
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])

    def loss(w):
        state = {n: part.view(p.shape) for part, (n, p) in zip(w.split(sizes), parameters.items())}
        return nn.functional.cross_entropy(torch.func.functional_call(model, state, (x,)), y)

    return torch.func.hessian(loss)(torch.cat([p.detach().reshape(-1) for p in parameters.values()]))


class Attention(nn.Module):
    """Its fused kernels have no second derivative."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 4)

    def forward(self, x):
        x = x.view(len(x), -1, 4)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


CASES = {
    "mlp, trained": lambda: (trained(mlp(), batches()), batches()),
    "mlp, not trained": lambda: (mlp(), batches()),
    "mlp, float64": lambda: (mlp().double(), [(x.double(), y) for x, y in batches()]),
    "linear": lambda: (nn.Linear(6, 4), batches()),
    "attention": lambda: (Attention(), batches(features=8)),
}


@pytest.mark.parametrize("case", CASES)
def test_against_the_dense_hessian(case):
    torch.manual_seed(0)
    model, data = CASES[case]()
    model.eval()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = dense_hessian(model, data).double()
    found = measure.curvature(model, cross_entropy, data, top=5)
    assert found.converged
    expected = torch.linalg.eigvalsh(exact).flip(0)[:5].tolist()
    assert found.eigenvalues == pytest.approx(expected, rel=1e-4, abs=1e-4 * expected[0])
    assert abs(found.trace - exact.trace().item()) <= found.trace_error


def test_the_largest_algebraically_not_in_size():
    h = torch.tensor([-50.0, 3.0, 2.0, 1.0, -1.0], dtype=torch.float64)
    found = curvature_at(FunctionLossAt(lambda w: 0.5 * (h * w**2).sum(), torch.zeros(5)), top=2)
    assert found.eigenvalues == pytest.approx((3.0, 2.0), abs=1e-9)
    assert found.trace == pytest.approx(-45.0)


def test_the_error_bar_of_the_trace_covers_it_nineteen_times_in_twenty():
    g = torch.Generator().manual_seed(0)
    a = torch.randn(30, 30, dtype=torch.float64, generator=g)
    h = a @ a.T
    at = FunctionLossAt(lambda w: 0.5 * w @ h @ w, torch.zeros(30))
    found = [curvature_at(at, probes=20, seed=s, max_iterations=1) for s in range(100)]
    inside = sum(abs(f.trace - h.trace().item()) <= f.trace_error for f in found)
    assert 88 <= inside <= 100
    half_widths = sorted(f.trace_error for f in found)
    assert half_widths[50] < h.trace().item()  # and the bar says something


def test_many_dimensions_and_convergence():
    h = torch.linspace(0, 1, 20_000, dtype=torch.float64)
    h[7], h[70] = 30.0, 20.0
    at = FunctionLossAt(lambda w: 0.5 * (h * w**2).sum(), torch.zeros(20_000))
    found = curvature_at(at, top=2)
    assert found.converged
    assert found.eigenvalues == pytest.approx((30.0, 20.0), rel=1e-8)
    assert all(r <= 1e-5 * 30 for r in found.residuals)
    early = curvature_at(at, top=2, max_iterations=3)
    assert not early.converged
    assert early.products == 30 + 3
    # A residual bounds the distance to the nearest eigenvalue.
    for value, residual in zip(early.eigenvalues, early.residuals):
        assert (h - value).abs().min().item() <= residual


@pytest.mark.parametrize("top", [1, 3, 6])
def test_equal_and_zero_eigenvalues(top):
    isotropic = curvature_at(FunctionLossAt(lambda w: 2 * (w**2).sum(), torch.zeros(6)), top=top)
    assert isotropic.eigenvalues == pytest.approx([4.0] * top)
    linear = curvature_at(FunctionLossAt(lambda w: w.sum(), torch.zeros(6)), top=top)
    assert linear.eigenvalues == (0.0,) * top
    assert (linear.trace, linear.trace_error, linear.converged) == (0.0, 0.0, True)


def test_select_restricts_the_hessian():
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
    loss = lambda m, b: (5 * m[0].weight ** 2).sum() + (50 * m[1].weight ** 2).sum()  # noqa: E731
    assert measure.curvature(model, loss, [0]).eigenvalues == pytest.approx((100.0,))
    first = measure.curvature(model, loss, [0], select=lambda name, p, m: name.startswith("0"))
    assert first.eigenvalues == pytest.approx((10.0,))
    assert first.trace == pytest.approx(20.0)


def test_compiled_models_are_differentiated_twice():
    model, data = mlp().eval(), batches()
    expected = measure.curvature(model, cross_entropy, data)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(data[0][0]).sum().backward()
    assert measure.curvature(compiled, cross_entropy, data) == expected


def test_progress_and_json():
    told = []
    found = measure.curvature(mlp(), cross_entropy, batches(), top=2, probes=4, progress=lambda *p: told.append(p))
    assert [done for done, _ in told[:-1]] == list(range(1, found.products + 1))
    assert {total for _, total in told} == {told[-1][0]} == {4 + 100}
    assert Curvature.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_numbers_of_numpy():
    plain = {"top": 2, "probes": 3, "max_iterations": 5, "seed": 4}
    found, expected = (
        measure.curvature(mlp(), cross_entropy, batches(), **{k: kind(v) for k, v in plain.items()})
        for kind in (np.int64, int)
    )
    assert found.to_json() == json.loads(json.dumps(expected.to_json()))


def test_bad_options_are_named():
    for options, words in (({"top": 0}, "top=0"), ({"top": 10**6}, "top=1000000"), ({"probes": 1}, "probes=1")):
        with pytest.raises(ValueError, match=words):
            measure.curvature(mlp(), cross_entropy, batches(), max_iterations=10**6, **options)
    with pytest.raises(TypeError, match="seed='a': give a whole number"):
        measure.curvature(mlp(), cross_entropy, batches(), seed="a")
    with pytest.raises(ValueError, match="tolerance=nan: give a positive number"):
        measure.curvature(mlp(), cross_entropy, batches(), tolerance=np.nan)
    with pytest.raises(ValueError, match="max_iterations=2"):
        measure.curvature(mlp(), cross_entropy, batches(), top=3, max_iterations=2)
    square_root = Function(lambda w: w.sqrt().sum(), torch.zeros(2))
    with pytest.raises(ValueError, match="not finite"):
        measure.curvature(square_root, value_of, [0])
