"""What a filter is, for every kind of layer, and that ‖θ̂ᵢ‖ = a·‖wᵢ‖ for each."""

import pytest
import torch
from torch import nn

from cases import each_case
from smoothout import AdaSmoothOut, Rademacher, SmoothOut
from smoothout.filters import FilterLayout, filter_layout, filter_norms


class Conv1D(nn.Module):
    """Stands for Transformers' layer of that name: weight of shape (inputs, outputs)."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.zeros(outputs))


LAYOUTS = [
    (nn.Linear(3, 5), "weight", FilterLayout(0), 5),
    (nn.Linear(3, 5), "bias", FilterLayout("element"), 5),
    (nn.Conv2d(4, 6, 3, groups=2), "weight", FilterLayout(0), 6),
    (nn.Conv1d(4, 6, 3), "weight", FilterLayout(0), 6),
    (nn.ConvTranspose2d(4, 6, 3), "weight", FilterLayout(1), 6),
    (nn.ConvTranspose2d(4, 6, 3, groups=2), "weight", FilterLayout(1, groups=2), 6),
    (nn.ConvTranspose1d(4, 6, 3), "weight", FilterLayout(1), 6),
    (nn.Embedding(7, 3), "weight", FilterLayout(0), 7),
    (nn.Embedding(7, 3, padding_idx=-1), "weight", FilterLayout(0, clean_row=6), 7),
    (nn.EmbeddingBag(7, 3, padding_idx=2), "weight", FilterLayout(0, clean_row=2), 7),
    (nn.LSTM(3, 4), "weight_ih_l0", FilterLayout(0), 16),
    (nn.LSTM(3, 4), "bias_ih_l0", FilterLayout("element"), 16),
    (nn.MultiheadAttention(4, 2), "in_proj_weight", FilterLayout(0), 12),
    (Conv1D(5, 3), "weight", FilterLayout(1), 5),
]


@pytest.mark.parametrize(("module", "slot", "layout", "count"), LAYOUTS, ids=lambda x: x if isinstance(x, str) else "")
def test_layouts(module, slot, layout, count):
    parameter = getattr(module, slot)
    assert filter_layout(module, slot, parameter) == layout
    assert layout.count(parameter.shape) == count


def filters_of(tensor, layout):
    """Every filter as a flat vector, by slicing: slow and obvious."""
    if layout.axis == "element":
        return list(tensor.reshape(-1, 1))
    if layout.axis == 0:
        return [row.flatten() for row in tensor]
    groups = tensor.chunk(layout.groups)
    return [group[:, j].flatten() for group in groups for j in range(tensor.shape[1])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("strength", [1e-3, 0.15, 4.0])
@each_case
def test_every_filter_gets_noise_of_its_own_size(case, dtype, strength):
    model, rel = case.build().to(dtype), 1e-5 if dtype == torch.float32 else 1e-12
    perturbation = AdaSmoothOut(model, strength)._perturbation
    for selected, theta in zip(perturbation.selected, perturbation.draw(strength, 0)):
        layout = filter_layout(selected.layer, selected.layer_slot, selected.parameter)
        ours, theirs = filters_of(theta.double(), layout), filters_of(selected.parameter.detach().double(), layout)
        for i, (noise, weight) in enumerate(zip(ours, theirs, strict=True)):
            expected = 0.0 if i == layout.clean_row else strength * weight.norm().item()
            assert noise.norm().item() == pytest.approx(expected, rel=rel, abs=1e-14), (selected.name, i)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norms_are_taken_in_fp32_at_least(dtype):
    """300² · 4096 overflows fp16, and bf16 sums would stop growing early."""
    model = nn.Linear(4096, 2, bias=False).to(dtype)
    nn.init.constant_(model.weight, 300.0)
    assert filter_norms(model.weight, FilterLayout(0)).dtype == torch.float32
    theta = AdaSmoothOut(model, 0.1, noise=Rademacher())._perturbation.draw(0.1, 0)[0]
    assert theta.abs().max().item() == pytest.approx(30.0, rel=1e-5)


def test_zero_filters_and_zero_noise_get_none():
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight[1] = 0
        model.bias.zero_()

    class ZeroRow:
        def draw(self, parameter, generator):
            noise = torch.ones_like(parameter)
            noise[2] = 0
            return noise

    theta_w, theta_b = AdaSmoothOut(model, 0.5, noise=ZeroRow())._perturbation.draw(0.5, 0)
    assert theta_w[0].norm() == pytest.approx(0.5 * model.weight[0].norm().item(), rel=1e-6)
    assert (theta_w[1:] == 0).all()
    assert (theta_b == 0).all()


def test_the_padding_row_stays_clean_under_every_scale():
    model = nn.Embedding(5, 3, padding_idx=1)
    nn.init.normal_(model.weight)
    for scale in ("absolute", "weight", "filter"):
        theta = SmoothOut(model, 0.5, scale=scale)._perturbation.draw(0.5, 0)[0]
        assert (theta[1] == 0).all()
        assert (theta[[0, 2, 3, 4]] != 0).all()


@pytest.mark.parametrize("row", [0, 582, 1399])  # blocks hold 582 rows
def test_one_row_alone_stays_clean_in_an_embedding_of_several_blocks(row):
    (theta,) = SmoothOut(nn.Embedding(1400, 900, padding_idx=row))._perturbation.draw(0.5, 0)
    assert (theta == 0).all(dim=1).nonzero().tolist() == [[row]]


@pytest.mark.parametrize(("module", "slot", "layout", "count"), LAYOUTS, ids=lambda x: x if isinstance(x, str) else "")
def test_norms_of_filters(module, slot, layout, count):
    weight = getattr(module, slot).detach().double()
    expected = torch.stack([f.norm() for f in filters_of(weight, layout)])
    assert filter_norms(weight, layout).unique().sort().values == pytest.approx(
        expected.unique().sort().values, rel=1e-9
    )
