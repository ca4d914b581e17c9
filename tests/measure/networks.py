"""Small networks, losses and batches that the measurements' tests share."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from smoothout import measure


class Function(nn.Module):
    """A function of one parameter vector as a model: closed forms without a network."""

    def __init__(self, function, start, dtype=torch.float64):
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.as_tensor(start, dtype=dtype).clone())

    def forward(self):
        return self.function(self.w)


def value_of(model, batch):
    """The loss function of a `Function`."""
    return model()


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).double().mean()


def batches(count=3, size=8, features=6, classes=4, seed=5):
    """Batches of different lengths, the last one short."""
    g = torch.Generator().manual_seed(seed)
    sizes = [size] * (count - 1) + [size - 3]
    return [(torch.randn(n, features, generator=g), torch.randint(classes, (n,), generator=g)) for n in sizes]


def mlp(features=6, width=8, classes=4, seed=3, dropout=0.0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(features, width),
        nn.BatchNorm1d(width),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, classes),
    )
    for x, _ in batches():  # statistics that are not the initial ones
        model(x)
    return model


def trained(model, data, steps=60, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model, data[step % len(data)]).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model


def everything_about(model, loader=None):
    """All that a measurement must leave as it was, down to the bits, the objects and the version counters."""
    tensors = [*model.parameters(), *model.buffers()]
    return (
        [
            (id(t), t.data_ptr(), t._version, t.detach().clone().view(torch.uint8).tolist() if t.ndim else t.item())
            for t in tensors
        ],
        [(id(p.grad), None if p.grad is None else p.grad.tolist()) for p in model.parameters()],
        [m.training for m in model.modules()],
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
        None if loader is None else loader.generator.get_state().tolist(),
    )


OTHER_STATE = mlp(seed=9).state_dict()
MEASUREMENTS = {
    "sharpness": lambda m, f, b, **k: measure.sharpness(m, f, b, restarts=2, **k),
    "sharpness by ascent": lambda m, f, b, **k: measure.sharpness(m, f, b, restarts=2, method="ascent", **k),
    "sharpness in a subspace": lambda m, f, b, **k: measure.sharpness(m, f, b, restarts=2, subspace=40, **k),
    "sensitivity": lambda m, f, b, **k: measure.sensitivity(m, f, b, [0.0, 0.1], draws=2, **k),
    "fresh noise": lambda m, f, b, **k: measure.sensitivity(
        m, f, b, [0.1], scale="filter", fresh_noise_per_batch=True, **k
    ),
    "interpolate": lambda m, f, b, **k: measure.interpolate(m, m.state_dict(), OTHER_STATE, f, b, [-1, 0.5, 2], **k),
    "recomputed": lambda m, f, b, **k: measure.interpolate(
        m, m.state_dict(), OTHER_STATE, f, b, [0.5], batchnorm="recompute", **k
    ),
    "landscape": lambda m, f, b, **k: measure.landscape(m, f, b, steps=3, directions=2, **k),
    "landscape in 2-D": lambda m, f, b, **k: measure.landscape(m, f, b, dims=2, steps=3, **k),
    "curvature": lambda m, f, b, **k: measure.curvature(m, f, b, top=2, probes=2, max_iterations=5, **k),
    "suggest_strength": lambda m, f, b, **k: measure.suggest_strength(m, f, b, strengths=[0.1, 0.2], **k),
}
