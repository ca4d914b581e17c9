"""The long way through torch.compile: inductor, as users run it. In `make soak`; aot_eager stands for it elsewhere."""

import copy
import shutil

import pytest
import torch
from torch import nn

from smoothout import AdaSmoothOut

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a compiler"),
]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 36, 10)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().flatten(1))


def train(model, call, optimizer, steps, smooth=None):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(16, 1, 8, 8, generator=generator)
        y = torch.randint(10, (16,), generator=generator)
        if smooth is None:
            nn.functional.cross_entropy(call(x), y).backward()
        else:
            with smooth.perturbed():
                nn.functional.cross_entropy(call(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("how", ["perturbed", "attach", "in place"])
def test_compiled_training_equals_eager_training(how):
    torch._dynamo.reset()
    model = Network()
    expected = copy.deepcopy(model)
    train(expected, expected, torch.optim.SGD(expected.parameters(), 0.05), 30, AdaSmoothOut(expected, 0.2))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    smooth = AdaSmoothOut(model, 0.2)
    if how == "in place":
        model.compile(fullgraph=True)
        train(model, model, optimizer, 30, smooth)
    elif how == "perturbed":
        train(model, torch.compile(model, fullgraph=True), optimizer, 30, smooth)
    else:
        smooth.attach(optimizer)
        train(model, torch.compile(model), optimizer, 30)
    for (name, p), q in zip(model.named_parameters(), expected.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
