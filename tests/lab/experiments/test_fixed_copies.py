"""Deterministic SmoothOut as a method: the gradient of the mean loss of fixed copies, the same every step."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smoothout import SmoothOutEnsemble
from smoothout.lab.config import resolve
from smoothout.lab.methods import METHODS
from smoothout.lab.train.ghost_step import Batch, GhostStep

RATE, A, COPIES = 0.5, 0.2, 3


@pytest.fixture
def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return Batch(torch.randn(10, 1, 3, 4, generator=generator), torch.randint(3, (10,), generator=generator), total=10)


def method_of(model, draws=str(COPIES), **how):
    config = resolve(model="mlp", method="ensemble", strength=A, draws=draws, seed=5)
    update = GhostStep(model, torch.optim.SGD(model.parameters(), lr=RATE), **how)
    return METHODS["ensemble"].make(config, update, 10, 5)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_step_follows_the_mean_gradient_of_the_copies(model, batch, chunks):
    reference = copy.deepcopy(model)
    ensemble = SmoothOutEnsemble(reference, COPIES, A, seed=5)
    for _ in range(2):  # the same copies in every step
        loss = ensemble.loss(lambda m, b: F.cross_entropy(m(b[0]), b[1]), (batch.images, batch.labels))
        gradients = torch.autograd.grad(loss, list(reference.parameters()))
        with torch.no_grad():
            for p, g in zip(reference.parameters(), gradients):
                p -= RATE * g
    method = method_of(model, chunks=chunks)
    first, second = method.step(batch), method.step(batch)
    for p, expected in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(p, expected)
    torch.testing.assert_close(second.loss, loss.detach())
    assert first.evaluations == COPIES
    assert 0 <= first.correct <= 10
    assert method.strength == A


def test_a_draw_for_every_ghost_is_no_number_of_copies(model):
    with pytest.raises(ValueError, match="give the number of copies"):
        method_of(model, draws="ghost")
