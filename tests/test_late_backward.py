"""Outputs that a model only hands on: other backwards pass by them, and they outlive every draw."""

from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from smoothout import SmoothOut
from smoothout.late_backward import tensors_with_grad


class TwoTasks(nn.Module):
    """Weighs its losses by a parameter that it returns, as multi-task code does."""

    def __init__(self):
        super().__init__()
        self.layer, self.log_variance = nn.Linear(3, 2), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.layer(x), self.log_variance

    def loss(self, x):
        outputs, log_variance = self(x)
        return (outputs.square() * torch.exp(-log_variance) + log_variance).sum()


class Echo(nn.Module):
    """Returns its input, beside what it makes of it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return {"input": x, "output": self.layer(x)}

    def loss(self, x):
        return self(x)["output"].square().sum() + self(x)["input"].square().sum()


class OnlyAParameter(nn.Module):
    """A learned state, and nothing else."""

    def __init__(self):
        super().__init__()
        self.state = nn.Parameter(torch.ones(3))

    def forward(self):
        return self.state

    def loss(self, x):
        return (self() * x).square().sum()


MODELS = [TwoTasks, Echo, OnlyAParameter]
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)


def trained(model_class, how, steps=3):
    """Weights after some steps."""
    torch.manual_seed(0)
    model = model_class()
    optimizer, smooth = torch.optim.SGD(model.parameters(), lr=0.1), SmoothOut(model, 0.2)
    handle = smooth.attach(optimizer) if how == "attached" else None
    for _ in range(steps):
        if how == "attached":
            model.loss(X).backward()
        elif how == "samples":
            with smooth.samples(2) as draws:
                for _ in draws:
                    (model.loss(X) / 2).backward()
        else:
            with smooth.perturbed():
                model.loss(X).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert smooth.step_count == steps
    if handle is not None:
        handle.remove()
    model.loss(X).backward()  # and as plain training goes on: nothing of ours is left on a leaf
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("model_class", MODELS)
def test_a_model_that_returns_its_parameter_or_input_trains(model_class):
    explicit, attached = trained(model_class, "perturbed"), trained(model_class, "attached")
    assert all(torch.equal(p, q) for p, q in zip(explicit, attached, strict=True))
    trained(model_class, "samples")


@pytest.mark.parametrize("model_class", [TwoTasks, Echo])
def test_its_late_backward_still_raises(model_class):
    model = model_class()
    smooth = SmoothOut(model, 0.2)
    with smooth.perturbed():
        loss = model.loss(X)
    with pytest.raises(RuntimeError, match=r"noise is gone|modified by an inplace"):
        loss.backward()


def test_a_backward_of_the_draw_before_raises():
    model = nn.Sequential(nn.Linear(3, 2))
    with SmoothOut(model, 0.2).samples(2) as draws:
        next(draws)
        late = checkpoint(model, X, use_reentrant=False).sum()
        next(draws)
        with pytest.raises(RuntimeError, match="noise is gone"):
            late.backward()


def test_an_input_that_was_given_by_name_may_be_differentiated_later():
    model, x = Echo(), X * 2
    with SmoothOut(model, 0.2).perturbed():
        model(x=x)["output"].sum().backward(retain_graph=True)
    x.sum().backward()  # not the model's affair


def test_tensors_are_found_in_whatever_holds_them():
    class OneSlot:
        __slots__ = "held"

        def __init__(self, held):
            self.held = held

    def namespace(held):
        return SimpleNamespace(held=held, itself=None)

    for holder in (lambda x: {"a": [x, 1]}, lambda x: MappingProxyType({"a": x}), OneSlot, namespace):
        (found,) = tensors_with_grad(holder(X))
        assert found is X
    (found,) = tensors_with_grad(namespace(namespace(namespace(X))))
    assert found is X
    endless = namespace(None)
    endless.itself = endless
    assert tensors_with_grad(endless) == []


class WritesToItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        x += checkpoint(self.layers, x.clone(), use_reentrant=False)
        return x


def test_an_input_that_was_written_to_is_an_output():
    model = WritesToItsInput()
    with SmoothOut(model, 0.2).perturbed():
        loss = model(X.detach().clone()).square().mean()
    with pytest.raises(RuntimeError, match="noise is gone"):
        loss.backward()


class ReadsItsParameter(nn.Module):
    """Gives it away when it is called without an input."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), nn.Parameter(torch.zeros(1))

    def forward(self, x=None):
        return self.scale if x is None else self.layer(x) * self.scale.exp()


@pytest.mark.parametrize("draw", ["step", "forward"])
def test_a_parameter_that_was_only_read_is_no_late_backward(draw):
    model = ReadsItsParameter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    SmoothOut(model, 0.1).attach(optimizer, draw=draw)
    for _ in range(2):
        model().detach()
        model(X).square().mean().backward()
        optimizer.step()
