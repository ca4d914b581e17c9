"""What a measurement leaves as it was where the model or the loader has a state of its own. More is in test_loss_at."""

import random
import sys

import numpy as np
import pytest
import torch
from networks import batches, cross_entropy, everything_about, mlp
from torch import nn
from torch.utils.data import DataLoader, Dataset

from smoothout import measure
from smoothout.measure.loss_at import model_loss_at
from smoothout.measure.untouched import without_gradient_hooks


class MergesInEval(nn.Linear):
    """A low-rank adapter whose `eval()` adds it to the weight and whose `train()` takes it out again, as loralib's."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.ones(1, inputs)), nn.Parameter(torch.ones(outputs, 1))
        self.merged = False

    def train(self, mode=True):
        if mode == self.merged:
            self.weight.data += -self.b @ self.a if mode else self.b @ self.a
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        y = super().forward(x)
        return y if self.merged else y + x @ self.a.T @ self.b.T


def test_a_layer_that_merges_weights_in_eval_is_measured_and_left_as_it_is():
    model, data = nn.Sequential(MergesInEval(6, 4), nn.Dropout(0.5)).train(), batches()
    before, loss = everything_about(model), cross_entropy(model[0], data[0]).item()
    curve = measure.sensitivity(model, cross_entropy, data, [0.0, 1.0], select=lambda name, p, m: name[-1] in "ab")
    assert curve.losses[0] != curve.losses[1]
    assert everything_about(model) == before
    assert cross_entropy(model[0], data[0]).item() == loss


@pytest.mark.parametrize("hook", [lambda g: 0.1 * g, lambda g: g.clamp(-1e-3, 1e-3)])
def test_hooks_that_change_gradients_for_training_change_no_measurement_and_stay(hook):
    model, data = mlp(), batches()
    measured = [
        lambda: measure.curvature(model, cross_entropy, data, probes=2),
        lambda: measure.sharpness(model, cross_entropy, data, restarts=2),
    ]
    expected = [each() for each in measured]
    handles = [parameter.register_hook(hook) for parameter in model.parameters()]
    assert [each() for each in measured] == expected
    of_modules = [
        model[-1].register_full_backward_hook(lambda module, ins, outs: tuple(hook(g) for g in ins)),
        model[-1].register_full_backward_pre_hook(lambda module, outs: tuple(hook(g) for g in outs)),
    ]
    assert [each() for each in measured] == expected
    assert model[-1]._backward_hooks
    assert model[-1]._backward_pre_hooks
    for handle in of_modules:
        handle.remove()
    (plain,) = torch.autograd.grad(cross_entropy(model, data[0]), [model[0].weight])
    for handle in handles:
        handle.remove()
    (without,) = torch.autograd.grad(cross_entropy(model, data[0]), [model[0].weight])
    assert torch.equal(plain, hook(without))


class Caching(nn.Module):
    """Keeps what it computed in a buffer, and another buffer that was computed in inference mode."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(4)
        self.register_buffer("cache", None)
        self.register_buffer("factor", None)
        with torch.inference_mode():
            self.factor = torch.ones(4)

    def forward(self, x):
        self.cache = self.first.weight.detach().clone() if self.cache is None else self.cache
        return self.norm(self.first(x)) * self.factor


@pytest.mark.parametrize("inference", [False, True])
def test_buffers_that_are_none_or_were_made_in_inference_mode(inference):
    model = Caching().train()
    statistics = model.norm.running_var.clone()
    with torch.inference_mode(inference):
        measure.sensitivity(model, cross_entropy, batches(), [0.0, 0.1], train_mode=True)
    assert model.cache is None
    assert model.training
    assert torch.equal(model.norm.running_var, statistics)
    assert torch.equal(model.factor, torch.ones(4))


def test_an_interrupt_while_hooks_are_put_back_loses_none():
    model = mlp()
    for parameter in model.parameters():
        parameter.register_hook(lambda g: 0.1 * g)

    def trace(frame, event, argument):
        if len({p._backward_hooks is None for p in model.parameters()}) == 2:  # half-way
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    try:
        with pytest.raises(KeyboardInterrupt), without_gradient_hooks(model):
            assert not any(p._backward_hooks for p in model.parameters())
            sys.settrace(trace)
    finally:
        sys.settrace(before)
    assert all(p._backward_hooks for p in model.parameters())


def test_hooks_on_a_compiled_module_stay_on_it_and_change_no_measurement():
    inside, data = mlp(), batches()
    expected = measure.curvature(inside, cross_entropy, data, probes=2)
    model = torch.compile(inside, backend="eager")
    handle = model.register_full_backward_pre_hook(lambda module, outs: tuple(0.1 * g for g in outs))
    assert measure.curvature(model, cross_entropy, data, probes=2) == expected
    assert len(model._backward_pre_hooks) == 1
    assert not inside._backward_pre_hooks
    handle.remove()


class Observed(nn.Module):
    """Rounds to steps of the widest range seen, in eval mode too, as quantisation-aware training does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("range", torch.empty(0))

    def forward(self, x):
        seen = self.layer.weight.detach().abs().amax(1)
        if not self.range.numel():
            self.range.resize_(seen.shape).zero_()
        self.range.copy_(torch.maximum(self.range, seen))
        return self.layer(x) / self.range


def test_buffers_that_forward_passes_resize_and_write_to_in_eval_mode():
    model = Observed()
    before = everything_about(model)
    curve = measure.sensitivity(model, cross_entropy, batches(), [0.0, 5.0, 0.0])
    assert curve.losses[0] == curve.losses[2]  # the range seen at 5 is forgotten
    assert everything_about(model) == before


class Counted(nn.Module):
    """Keeps what it saw in a buffer, by a kernel that counts no version or, a large one, by torch's own operations."""

    def __init__(self, size, writes=True):
        super().__init__()
        self.layer, self.writes = nn.Linear(6, 4), writes
        self.register_buffer("seen", torch.zeros(size))

    def forward(self, x):
        y = self.layer(x)
        if self.writes and len(self.seen) == 4:
            version = self.seen._version
            nn.functional.batch_norm(y.detach(), self.seen, torch.ones(4), training=True)
            assert self.seen._version == version
        elif self.writes:
            self.seen[:4] += y.detach().mean(0)
        return y - self.seen[:4]


LARGE = 2**20 + 1


@pytest.mark.parametrize("size", [4, LARGE])
def test_every_evaluation_starts_from_the_same_buffers(size):
    model = Counted(size)
    curve = measure.sensitivity(model, cross_entropy, batches(), [0.0, 5.0, 0.0])
    assert curve.losses[0] == curve.losses[2]
    assert not model.seen.any()


def test_large_buffers_that_nobody_writes_to_are_not_copied_for_every_evaluation(monkeypatch):
    """They may be all weights of a quantised model."""
    copied = []
    monkeypatch.setattr("smoothout.measure.loss_at.copy_back", lambda buffer, values: copied.append(len(buffer)))
    measure.sensitivity(nn.Sequential(Counted(LARGE, writes=False)), cross_entropy, batches(), [0.0, 0.1])
    assert not copied


@pytest.mark.parametrize("name", ["sensitivity", "interpolate"])
def test_inside_cached_parametrizations_are_those_of_the_weights(name):
    model = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))
    states = [{key: factor * value for key, value in model.state_dict().items()} for factor in (1.0, 2.0)]

    def losses():
        if name == "interpolate":
            return measure.interpolate(model, *states, cross_entropy, batches(), [0.0, 1.0]).losses
        return measure.sensitivity(model, cross_entropy, batches(), [0.0, 0.5]).losses

    expected = losses()
    with nn.utils.parametrize.cached():
        assert losses() == expected
        direct = cross_entropy(model, batches()[0])
    assert direct == cross_entropy(model, batches()[0])


@pytest.mark.parametrize("name", ["sensitivity", "interpolate"])
def test_inside_autocast_too(name):
    """It keeps weights that it has cast."""
    model, data = nn.Linear(6, 4), batches()
    states = [{key: factor * value for key, value in model.state_dict().items()} for factor in (1.0, 2.0)]

    def losses(loss_fn):
        if name == "interpolate":
            return measure.interpolate(model, *states, loss_fn, data, [0.0, 1.0]).losses
        return measure.sensitivity(model, loss_fn, data, [0.0, 0.5]).losses

    expected = losses(torch.autocast("cpu", dtype=torch.bfloat16)(cross_entropy))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = cross_entropy(model, data[0])
        assert losses(cross_entropy) == expected
        assert cross_entropy(model, data[0]) == before


def test_a_loss_that_goes_backward_itself_adds_to_no_gradient():
    def penalised(model, batch):
        with torch.enable_grad():
            cross_entropy(model, batch).backward()
        return cross_entropy(model, batch) + model[0].weight.grad.norm()

    model = mlp().eval()
    cross_entropy(model, batches()[0]).backward()
    before = everything_about(model)
    measure.sensitivity(model, penalised, batches(), [0.0, 0.1])
    assert everything_about(model) == before


def test_random_numbers_of_every_kind_start_anew_in_each_evaluation():
    def noisy(model, batch):
        return cross_entropy(model, batch) * (random.random() + np.random.rand() + torch.rand(()))

    model = mlp()
    before = everything_about(model)
    with model_loss_at(model, noisy, batches()) as at:
        assert at.loss(at.start) == at.loss(at.start)
    assert everything_about(model) == before


class Augmented(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.randn(6), i % 4


def test_workers_that_stay_are_left_alone_and_give_the_same_images_in_every_evaluation():
    loader = DataLoader(Augmented(), batch_size=2, num_workers=1, persistent_workers=True)
    epoch = iter(loader)
    next(epoch)
    with model_loss_at(mlp(), cross_entropy, loader) as at:
        assert at.loss(at.start) == at.loss(at.start)
    assert loader._iterator is epoch
    assert len(list(epoch)) == 3  # the epoch goes on
