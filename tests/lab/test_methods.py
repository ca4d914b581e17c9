"""Methods on ghost batches: what gradient a step takes, at which weights, from how many draws."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smoothout import SmoothOut, SmoothOutEnsemble
from smoothout.lab.config import ConfigError, resolve
from smoothout.lab.methods import METHODS, Plain, Smoothed
from smoothout.lab.models import ghost_sizes
from smoothout.lab.train.ghost_step import Batch, GhostStep


@pytest.fixture
def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(10, 1, 3, 4, generator=generator)
    return Batch(images, torch.randint(3, (10,), generator=generator), total=10)


def update_of(model, **how):
    return GhostStep(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), **how)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("images", "batch_size", "sizes"),
    [
        (2048, 2048, [128] * 16),
        (1024, 1024, [128] * 8),
        (5000, 5000, [129] * 38 + [98]),
        (6000, 6000, [131] * 45 + [105]),
        (848, 2048, [53] * 16),  # the short last batch of 50,000
        (100, 100, [100]),
        (17, 2048, [2] * 7 + [3]),  # a ghost of one image has no statistics
        (16, 2048, [2] * 8),
        (5, 2048, [2, 3]),
        (3, 2048, [3]),
        (1, 2048, [1]),
    ],
)
def test_the_authors_rule_for_ghosts(images, batch_size, sizes):
    assert ghost_sizes(images, max(1, batch_size // 128)) == sizes


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 10])
def test_ghosts_add_up_to_the_gradient_of_the_mean_loss(model, batch, chunks):
    expected = torch.autograd.grad(F.cross_entropy(model(batch.images), batch.labels), list(model.parameters()))
    update = update_of(model, chunks=chunks)
    losses = [update.backward(ghost).loss for ghost in update.ghosts(batch)]
    for parameter, gradient in zip(model.parameters(), expected):
        torch.testing.assert_close(parameter.grad, gradient)
    torch.testing.assert_close(sum(losses), F.cross_entropy(model(batch.images), batch.labels).detach())


def test_smoothout_is_algorithm_1(model, batch):
    by_hand = copy.deepcopy(model)
    method = Smoothed(update_of(model), SmoothOut(model, 0.1, seed=3))
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.5, momentum=0.9)
    smooth = SmoothOut(by_hand, 0.1, seed=3)
    for _ in range(3):
        result = method.step(batch)
        with smooth.perturbed():
            loss = F.cross_entropy(by_hand(batch.images), batch.labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(result.loss, loss.detach())
        assert result.evaluations == 1
    assert torch.equal(weights(model), weights(by_hand))


def noisy_weights_of_passes(model, method, batch):
    """The weights that each forward of one step saw."""
    seen = []
    with model.register_forward_hook(lambda *_: seen.append(weights(model))):
        method.step(batch)
    return seen


def test_one_draw_a_step_is_the_same_for_all_ghosts(model, batch):
    method = Smoothed(update_of(model, chunks=5), SmoothOut(model, 0.1), draws=1)
    seen = noisy_weights_of_passes(model, method, batch)
    assert len(seen) == 5
    assert all(torch.equal(each, seen[0]) for each in seen)


def test_a_draw_for_every_ghost(model, batch):
    before = weights(model)
    method = Smoothed(update_of(model, chunks=5), SmoothOut(model, 0.1), draws=None)
    seen = noisy_weights_of_passes(model, method, batch)
    assert len({tuple(each.tolist()) for each in [*seen, before]}) == 6
    assert method.smooth.step_count == 1  # one update is one step of the schedule


@pytest.mark.parametrize(("share", "clean"), [(0.4, 2), (0.5, 3), (0.9, 4), (0.99, 4)])
def test_the_last_ghosts_see_clean_weights(model, batch, share, clean):
    before = weights(model)
    method = Smoothed(update_of(model, chunks=5), SmoothOut(model, 0.1), draws=None, clean_share=share)
    seen = noisy_weights_of_passes(model, method, batch)
    assert [torch.equal(each, before) for each in seen] == [False] * (5 - clean) + [True] * clean
    assert len({tuple(each.tolist()) for each in seen}) == 5 - clean + 1


@pytest.mark.parametrize(("share", "noisy"), [(0.0, [0, 0, 1, 1, 2]), (0.4, [0, 0, 1])])
def test_ghosts_in_turn_share_a_draw(model, batch, share, noisy):
    before = weights(model)
    shared = {"draws": None, "clean_share": share, "ghosts_per_draw": 2}
    method = Smoothed(update_of(model, chunks=5), SmoothOut(model, 0.1), **shared)
    seen = noisy_weights_of_passes(model, method, batch)
    of_draw = dict(zip(noisy, seen))
    assert len({tuple(each.tolist()) for each in [before, *of_draw.values()]}) == len(of_draw) + 1
    assert all(torch.equal(each, of_draw[draw]) for draw, each in zip(noisy, seen))
    assert all(torch.equal(each, before) for each in seen[len(noisy) :])


def test_n_draws_average_n_gradients_and_cost_n_evaluations(model, batch):
    reference = copy.deepcopy(model)
    smooth = SmoothOut(reference, 0.1, seed=3)
    with smooth.samples(4) as draws:
        losses = []
        for _ in draws:
            losses.append(F.cross_entropy(reference(batch.images), batch.labels) / 4)
            losses[-1].backward()
    result = Smoothed(update_of(model, chunks=2), SmoothOut(model, 0.1, seed=3), draws=4).step(batch)
    torch.optim.SGD(reference.parameters(), lr=0.5, momentum=0.9).step()
    torch.testing.assert_close(weights(model), weights(reference))
    torch.testing.assert_close(result.loss, torch.stack(losses).sum().detach())
    assert result.evaluations == 4
    assert 0 <= float(result.correct) <= 10


def test_antithetic_draws_come_in_pairs(model, batch):
    before = weights(model)
    method = Smoothed(update_of(model), SmoothOut(model, 0.1), draws=2, antithetic=True)
    plus, minus = noisy_weights_of_passes(model, method, batch)
    torch.testing.assert_close(plus + minus, 2 * before)


def test_strength_0_is_plain_training_bit_for_bit(model, batch):
    other = copy.deepcopy(model)
    plain, smoothed = Plain(update_of(model, chunks=3)), Smoothed(update_of(other, chunks=3), SmoothOut(other, 0.0))
    for _ in range(3):
        assert torch.equal(plain.step(batch).loss, smoothed.step(batch).loss)
    assert torch.equal(weights(model), weights(other))


def test_the_gradient_is_clipped_after_the_ghosts_are_added(model, batch):
    before = weights(model)
    update = GhostStep(model, torch.optim.SGD(model.parameters(), lr=1.0), chunks=5, clip=1e-3)
    Plain(update).step(batch)
    assert float((weights(model) - before).norm()) == pytest.approx(1e-3, rel=1e-3)


def test_fp16_scales_the_loss_and_unscales_the_gradient(model, batch):
    other = copy.deepcopy(model)
    exact, update = update_of(model), update_of(other, amp="fp16")
    for _ in range(2):
        Plain(exact).step(batch)
        Plain(update).step(batch)
    assert update.scaler.get_scale() > 1
    torch.testing.assert_close(weights(model), weights(other), atol=5e-3, rtol=5e-2)


@pytest.mark.parametrize(
    ("settings", "noise", "scale"),
    [
        ({}, "Uniform()", "Absolute()"),
        ({"method": "adasmoothout", "scale_epsilon": 1e-6}, "Uniform()", "Filter(epsilon=1e-06)"),
        ({"noise": "bernoulli", "noise_p": 0.3, "scale": "weight"}, "Bernoulli(p=0.3)", "Weight()"),
        ({"noise": "gaussian", "scale": "weight", "strength": 0.1}, "Gaussian()", "Weight()"),
    ],
)
def test_a_configuration_becomes_the_smoothout_it_names(model, settings, noise, scale):
    config = resolve(**settings, seed=5, denoise=False, strength_schedule="linear", strength_warmup=2)
    method = METHODS[config.method].make(config, update_of(model), 100, 10)
    smooth = method.smooth
    assert (str(smooth._perturbation.noise), str(smooth._perturbation.scale)) == (noise, scale)
    assert (smooth.denoise, smooth._perturbation.seed, smooth.strength) == (False, 5, config.strength)
    assert smooth.schedule(10) == pytest.approx(0.1 * 0.5)  # linear over 100 steps, times a warm-up of 20


@pytest.mark.parametrize(
    ("settings", "perturbed"),
    [
        ({}, ["0.weight", "0.bias"]),
        ({"perturb_bn": True}, ["0.weight", "0.bias", "1.weight", "1.bias"]),
        ({"perturb_bn": True, "perturb_weights": False}, ["1.weight", "1.bias"]),
    ],
)
def test_which_parameters_take_noise_is_a_switch(settings, perturbed):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    method = METHODS["smoothout"].make(replace(resolve(), **settings), update_of(model), 1, 1)
    assert [each.name for each in method.smooth._perturbation.selected] == perturbed
    copies = METHODS["ensemble"].make(resolve(method="ensemble", draws="2", **settings), update_of(model), 1, 1)
    assert [each.name for each in copies.ensemble._perturbation.selected] == perturbed


def test_something_must_take_noise():
    with pytest.raises(ConfigError, match="leaves nothing to perturb: give perturb_bn"):
        resolve(perturb_weights=False)
    plain = {"method": "plain", "perturb_weights": False}
    assert resolve(**plain) == resolve(method="plain")  # it takes no noise: the same run


# ---- fixed copies ----------------------------------------------------------------------------------------------------

A, COPIES = 0.2, 3


def copies_of(model, draws=str(COPIES), **how):
    config = resolve(model="mlp", method="ensemble", strength=A, draws=draws, seed=5)
    update = GhostStep(model, torch.optim.SGD(model.parameters(), lr=0.5), **how)
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
                p -= 0.5 * g
    method = copies_of(model, chunks=chunks)
    first, second = method.step(batch), method.step(batch)
    torch.testing.assert_close(weights(model), weights(reference))
    torch.testing.assert_close(second.loss, loss.detach())
    assert first.evaluations == COPIES
    assert 0 <= first.correct <= 10
    assert method.strength == A


def test_a_draw_for_every_ghost_is_no_number_of_copies(model):
    with pytest.raises(ValueError, match="give the number of copies"):
        copies_of(model, draws="ghost")
