"""Networks that misbehave, for `--model odd_models:…`."""

import math
from functools import partial

import torch
from torch import nn


class _CountsCalls(nn.Module):
    """A linear network whose training forward passes are numbered, across interruptions too."""

    def __init__(self, classes: int, input_shape: tuple[int, ...], bad_call: int) -> None:
        super().__init__()
        self.linear = nn.Linear(math.prod(input_shape), classes)
        self.bad_call = bad_call
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        out = self.linear(x.flatten(1))
        if self.training:
            self.calls += 1
            if int(self.calls) == self.bad_call:
                return self.spoilt(out)
        return out

    def spoilt(self, out):
        raise NotImplementedError


class _NanLoss(_CountsCalls):
    def spoilt(self, out):
        return out * torch.nan


class _NanGradient(_CountsCalls):
    def spoilt(self, out):
        out.register_hook(lambda gradient: gradient * torch.nan)
        return out


nan_loss_in_call_1, nan_loss_in_call_9 = partial(_NanLoss, bad_call=1), partial(_NanLoss, bad_call=9)
nan_gradient_in_call_8 = partial(_NanGradient, bad_call=8)


def with_dropout(classes, input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 16), nn.Dropout(0.5), nn.Linear(16, classes))


class NewBuffer(nn.Module):
    """Subtracts a running mean that is a new tensor after every pass."""

    def __init__(self, classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = nn.Linear(math.prod(input_shape), classes)
        self.register_buffer("mean", torch.zeros(math.prod(input_shape)))

    def forward(self, x):
        x = x.flatten(1)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.linear(x - self.mean)


class NormTwice(nn.Module):
    def __init__(self, classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(math.prod(input_shape), 16), nn.Linear(16, 16)
        self.norm, self.last = nn.BatchNorm1d(16), nn.Linear(16, classes)

    def forward(self, x):
        inner = self.norm(self.first(x.flatten(1))).relu()
        return self.last(self.norm(self.second(inner)).relu())


class SpareWeights(nn.Module):
    def __init__(self, classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(math.prod(input_shape), classes), nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x.flatten(1))
