import pytest
import torch
from torch import nn

from smoothout.select import everything, is_normalisation, select_parameters


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


def test_others_are_not():
    assert not is_normalisation(NormalisedLinear(3, 3))
    assert [s.name for s in select_parameters(PreNorm())] == ["linear.weight", "linear.bias"]


def test_only_trainable_floating_parameters_and_tied_ones_once():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "frozen": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    model["frozen"].requires_grad_(False)
    model.register_parameter("count", nn.Parameter(torch.tensor(3), requires_grad=False))
    assert [s.name for s in select_parameters(model)] == ["a.weight", "a.bias", "b.bias"]


def test_a_predicate_sees_name_parameter_and_module():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    seen = []

    def weights_of_linear(name, parameter, module):
        seen.append(name)
        return isinstance(module, nn.Linear) and parameter.ndim == 2

    assert [s.name for s in select_parameters(model, weights_of_linear)] == ["0.weight", "2.weight"]
    assert seen == [name for name, _ in model.named_parameters()]
