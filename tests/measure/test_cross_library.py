"""Curvature against a rival library, hessian-eigenthings, on networks with a real loss."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smoothout import measure

rival = pytest.importorskip("hessian_eigenthings")


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("depth", [1, 3])
def test_leading_eigenvalues_and_trace_agree(depth):
    torch.manual_seed(depth)
    widths = [6, *[12] * depth]
    hidden = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    model = nn.Sequential(*hidden, nn.Linear(12, 4)).double()
    batches = [(torch.randn(20, 6).double(), torch.randint(4, (20,))) for _ in range(3)]
    ours = measure.curvature(model, loss_fn, batches, top=3, probes=200, tolerance=1e-8)
    operator = rival.HessianOperator(model, batches, loss_fn)
    theirs = rival.lanczos(operator, k=3, which="LA", tol=1e-8, max_iter=100, reorthogonalize=True, seed=0)
    found = sorted((float(v) for v in theirs.eigenvalues), reverse=True)
    assert ours.eigenvalues == pytest.approx(found, rel=1e-5)
    trace = rival.hutchinson(operator, num_samples=400, seed=1)
    assert abs(ours.trace - float(trace.estimate)) < 3 * (ours.trace_error + float(trace.stderr))
