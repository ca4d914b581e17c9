import pytest
import torch
from torch import nn

from smoothout import AdaSmoothOut, SmoothOut
from smoothout.blocks import block_elements
from smoothout.filters import FilterLayout, filter_layout
from smoothout.select import everything, is_normalisation, only_normalisation, select_parameters


class LlamaRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class FancyScale(LlamaRMSNorm):
    """Found through the class it derives from."""


class NormalisedLinear(nn.Linear):
    """Not a normalisation layer, whatever its name begins with."""


class PreNorm(nn.Module):
    """A wrapper: what is inside counts."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(3), nn.Linear(3, 3)


NORMS = [
    nn.BatchNorm2d(3),
    nn.SyncBatchNorm(3),
    nn.LayerNorm(3),
    nn.GroupNorm(1, 3),
    nn.InstanceNorm1d(3, affine=True),
    nn.RMSNorm(3),
]


@pytest.mark.parametrize(
    "module", [*NORMS, nn.RMSNorm(3), LlamaRMSNorm(), FancyScale()], ids=lambda m: type(m).__name__
)
def test_normalisation_layers_are_found_by_class(module):
    assert is_normalisation(module)
    assert select_parameters(module) == []
    assert select_parameters(module, everything)
    assert select_parameters(module, only_normalisation) == select_parameters(module, everything)


def test_others_are_not():
    assert not is_normalisation(NormalisedLinear(3, 3))
    assert [s.name for s in select_parameters(PreNorm())] == ["linear.weight", "linear.bias"]
    assert select_parameters(nn.Linear(3, 3), only_normalisation) == []


def test_only_trainable_floating_parameters_and_tied_ones_once():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "frozen": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    model["frozen"].requires_grad_(False)
    model.register_parameter("count", nn.Parameter(torch.tensor(3), requires_grad=False))
    model.register_parameter("phase", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    assert [s.name for s in select_parameters(model)] == ["a.weight", "a.bias", "b.bias"]


def test_a_predicate_sees_name_parameter_and_module():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    seen = []

    def weights_of_linear(name, parameter, module):
        seen.append(name)
        return isinstance(module, nn.Linear) and parameter.ndim == 2

    assert [s.name for s in select_parameters(model, weights_of_linear)] == ["0.weight", "2.weight"]
    assert seen == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("home", [nn.utils.parametrizations, nn.utils], ids=["parametrization", "old"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weight_and_spectral_norm_keep_the_layers_filters(norm, home):
    model = nn.Sequential(getattr(home, norm)(nn.ConvTranspose2d(4, 6, 3, groups=2)), nn.Linear(3, 3))
    selected = select_parameters(model, lambda name, parameter, module: isinstance(module, nn.ConvTranspose2d))
    whole = [s for s in selected if s.parameter.shape == (4, 3, 3, 3)]
    assert [filter_layout(s.layer, s.layer_slot, s.parameter) for s in whole] == [FilterLayout(1, groups=2)]
    lengths = [s for s in selected if s.parameter.shape == (4, 1, 1, 1)]  # of the rows
    assert {filter_layout(s.layer, s.layer_slot, s.parameter) for s in lengths} <= {FilterLayout(0)}
    assert len(selected) == (3 if norm == "weight_norm" else 2)
    with AdaSmoothOut(model).perturbed():
        model[0](torch.randn(1, 4, 5, 5)).sum().backward()


def test_a_parametrization_that_keeps_a_tensor_of_another_shape_is_cut_by_rows():
    class Doubled(nn.Module):
        def forward(self, half):
            return torch.cat([half, half])

        def right_inverse(self, weight):
            return weight[: len(weight) // 2]

    layer = nn.ConvTranspose1d(4, 8, 3, groups=4)
    nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    (stored,) = (s for s in select_parameters(layer) if s.slot == "original")
    assert (stored.layer, stored.layer_slot) == (layer, "weight")
    assert filter_layout(layer, "weight", stored.parameter) == FilterLayout(0)
    with AdaSmoothOut(layer).perturbed():
        layer(torch.randn(1, 4, 5)).sum().backward()


def test_a_padding_row_stays_clean_wherever_the_tied_embedding_stands():
    model = nn.ModuleDict({"head": nn.Linear(3, 7, bias=False), "embed": nn.Embedding(7, 3, padding_idx=2)})
    model["head"].weight = model["embed"].weight
    with SmoothOut(model, 0.5).perturbed():
        assert (model["embed"].weight == 0).all(dim=1).tolist() == [i == 2 for i in range(7)]
    assert select_parameters(model, lambda name, parameter, module: isinstance(module, nn.Linear))


def test_a_padding_row_that_begins_a_block_of_noise_stays_clean():
    first = block_elements(torch.device("cpu")) // 256
    model = nn.Embedding(2 * first, 256, padding_idx=first)
    before = model.weight.detach().clone()
    with SmoothOut(model, 0.5).perturbed():
        assert (model.weight == before).all(dim=1).nonzero().tolist() == [[first]]


def test_one_row_may_be_longer_than_a_block_of_noise():
    model = nn.Linear(block_elements(torch.device("cpu")) + 1, 2, bias=False)
    before = model.weight.detach().clone()
    with AdaSmoothOut(model).perturbed():
        assert (model.weight != before).float().mean() > 0.9


def test_what_layers_of_two_kinds_share_has_the_filters_of_the_first():
    down, up = nn.Conv1d(4, 3, 1, bias=False), nn.ConvTranspose1d(3, 4, 1, bias=False)
    up.weight = down.weight  # a tied autoencoder
    for layers, axis in (((down, up), 0), ((up, down), 1)):
        (one,) = select_parameters(nn.Sequential(*layers))
        assert filter_layout(one.layer, one.layer_slot, one.parameter).axis == axis


def test_gated_norms_of_other_libraries_are_norms():
    class MambaRMSNormGated(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    model = nn.Sequential(nn.Linear(4, 4, bias=False), MambaRMSNormGated())
    assert [s.name for s in select_parameters(model)] == ["0.weight"]
