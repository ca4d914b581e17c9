"""One table of models that the method's tests go through: how to build each, and a batch for it."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]
    perturbed: int  # tensors that take noise by default

    def loss(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).float().square().mean()


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


class LastHidden(nn.Module):
    """An LSTM whose output is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 7, num_layers=2, batch_first=True)
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class UnusedParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 4), nn.Linear(6, 4)
        self.scalar = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.scalar * self.used(x)


class SharedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(6, 6)
        self.first, self.second = layer, layer

    def forward(self, x):
        return self.second(self.first(x).relu())


def frozen_layers() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    return model


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=12, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)


CASES = {
    "mlp": Case(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), lambda: torch.randn(5, 6), 4),
    "conv_bn": Case(
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 4)
        ),
        lambda: torch.randn(5, 3, 4, 4),
        4,
    ),
    "transposed_conv_groups": Case(
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.ReLU(), nn.ConvTranspose2d(6, 2, 2)),
        lambda: torch.randn(3, 4, 4, 4),
        4,
    ),
    "lstm": Case(LastHidden, lambda: torch.randn(4, 3, 5), 10),
    "transformer": Case(transformer, lambda: torch.randn(3, 4, 8), 16),
    "tied_embedding": Case(TiedLanguageModel, lambda: torch.randint(1, 11, (4, 5)), 1),
    "frozen_layers": Case(frozen_layers, lambda: torch.randn(5, 6), 2),
    "unused_parameter": Case(UnusedParameter, lambda: torch.randn(5, 6), 5),
    "shared_module": Case(SharedModule, lambda: torch.randn(5, 6), 2),
}

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

each_case = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])


def snapshot(model: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """Bytes and addresses of all parameters and buffers."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: (t.detach().clone(), t.data_ptr()) for name, t in tensors}


def assert_same(model: nn.Module, before: dict[str, tuple[torch.Tensor, int]], buffers: bool = False) -> None:
    """Bit for bit and in the same storage (−0.0 is not 0.0 here)."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | (dict(model.named_buffers()) if buffers else {})
    for name, t in tensors.items():
        values, address = before[name]
        assert torch.equal(_bytes(t), _bytes(values)), f"{name} changed"
        assert t.data_ptr() == address, f"{name} moved to another storage"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def assert_equal_models(one: nn.Module, other: nn.Module) -> None:
    """Two models of one architecture have the same parameters and buffers."""
    for (name, p), q in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(p, q), name


def explicit_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, smooth, batches: list, accumulate: int) -> None:
    """The loop that integrations are held to: micro-batches of one update share a θ, and gradients are clipped."""
    for first in range(0, len(batches), accumulate):
        with smooth.perturbed():
            for x, y in batches[first : first + accumulate]:
                ((model(x) - y).square().mean() / accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def assert_moved(model: nn.Module, before: dict[str, tuple[torch.Tensor, int]], smooth) -> None:
    """Every tensor that takes noise has moved, no other has. A lone −0.0 may take none, and from a few numbers in half
    precision all of it may be rounded away."""
    selected = {id(s.parameter) for s in smooth._perturbation.selected}
    for name, p in model.named_parameters(remove_duplicate=False):
        stays = torch.equal(p.detach(), before[name][0])
        may_stay = not p.any() or (p.dtype.itemsize < 4 and p.numel() <= 8)
        assert stays is (id(p) not in selected) or (stays and may_stay), name
