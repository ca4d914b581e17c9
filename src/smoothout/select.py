"""Which parameters take noise."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

Predicate = Callable[[str, nn.Parameter, nn.Module], bool]

# Other libraries' layers (LlamaRMSNorm, T5LayerNorm, LayerNorm2d, …) are found by the name of a class they derive from.
_NORM_CLASS_NAME = re.compile(r"Norm(Gated)?([123]d)?$")
# Names that wrappers (DDP, torch.compile, checkpointing) put in front of a parameter's own.
_WRAPPER_PREFIX = re.compile(r"(^|(?<=\.))(module|_orig_mod|_checkpoint_wrapped_module)\.")


@dataclass(frozen=True)
class Selected:
    """A parameter that takes noise.

    Args:
        name: its first name in the model.
        owner, slot: the module that holds it, and under which name: there it is read at each draw.
        layer, layer_slot: the layer whose weight it is, and under which name. That is another module than the owner
            under weight and spectral norm, where a parametrization holds the weight, and where the weight is tied to
            that of an embedding with a `padding_idx` later in the model.
    """

    name: str
    owner: nn.Module
    slot: str
    layer: nn.Module
    layer_slot: str

    @property
    def plain_name(self) -> str:
        """The name without wrappers' prefixes: a state saved from a wrapped model loads into a bare one."""
        return _WRAPPER_PREFIX.sub("", self.name)

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.owner._parameters.get(self.slot)
        if parameter is None:
            raise RuntimeError(f"parameter {self.name!r} is no longer in the model: make a new SmoothOut for it")
        return parameter


Edge = tuple[dict[str, nn.Module | None], str, nn.Module]  # a parent's children, a name, and the child under it


def edges_to(model: nn.Module, selected: Sequence[Selected]) -> list[Edge]:
    """The way from a model to the owners of these parameters; raises if there is none any more."""
    above: dict[nn.Module, Edge] = {}
    parents: dict[nn.Module, nn.Module] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None and child not in above and child is not model:
                above[child], parents[child] = (parent._modules, name, child), parent
    edges: dict[nn.Module, Edge] = {}
    for each in selected:
        module = each.owner
        while module is not model:
            if module not in above:
                raise RuntimeError(f"the layer of {each.name!r} was replaced: make a new SmoothOut for this model")
            edges[module] = above[module]
            module = parents[module]
    return list(edges.values())


def are_there(edges: Sequence[Edge]) -> bool:
    """Whether every module is still where it was."""
    return all(children.get(name) is child for children, name, child in edges)


def owners_of(model: nn.Module, parameters: Sequence[Any]) -> dict[nn.Module, list[tuple[str, int]]]:
    """Every module that holds one of these parameters, tied ones under each of their names: slots, and which it is."""
    index = {id(p): i for i, p in enumerate(parameters)}
    slots: dict[nn.Module, list[tuple[str, int]]] = defaultdict(list)
    for module in model.modules():
        for slot, parameter in module._parameters.items():
            if id(parameter) in index:
                slots[module].append((slot, index[id(parameter)]))
    return dict(slots)


def is_normalisation(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer, torch's own or another library's, by its class."""
    return any(_NORM_CLASS_NAME.search(cls.__name__) for cls in type(module).__mro__)


def not_normalisation(name: str, parameter: nn.Parameter, module: nn.Module) -> bool:
    """The default: every parameter but the scales and shifts of normalisation layers."""
    return not is_normalisation(module)


def only_normalisation(name: str, parameter: nn.Parameter, module: nn.Module) -> bool:
    """The opposite of the default: the scales and shifts of normalisation layers, and nothing else."""
    return is_normalisation(module)


def everything(name: str, parameter: nn.Parameter, module: nn.Module) -> bool:
    """Every parameter, those of normalisation layers too (as the authors' runs until 2018-11)."""
    return True


def select_parameters(model: nn.Module, predicate: Predicate | None = None) -> list[Selected]:
    """The trainable floating-point parameters for which the predicate holds, tied ones once, in the model's order."""
    predicate = not_normalisation if predicate is None else predicate
    if not callable(predicate):
        raise TypeError(f"select={predicate!r} is not callable: give a function (name, parameter, module) -> bool")
    return [s for s, module in _trainable(model) if predicate(s.name, s.parameter, module)]


def frozen_parameters(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """The floating-point parameters that do not train now: name, the module that holds it, and its slot there."""
    return [
        (_full_name(module_name, slot), module, slot)
        for module_name, module in model.named_modules()
        for slot, p in module._parameters.items()
        if p is not None and not p.requires_grad and p.is_floating_point()
    ]


def _trainable(model: nn.Module) -> Iterator[tuple[Selected, nn.Module]]:
    """Every candidate, with the layer that its name speaks of."""
    modules = dict(model.named_modules())
    places: dict[int, list[tuple[str, nn.Module, str]]] = defaultdict(list)
    for module_name, module in modules.items():
        for slot, parameter in module._parameters.items():
            if isinstance(parameter, UninitializedParameter):
                name = _full_name(module_name, slot)
                raise ValueError(f"{name} has no shape yet: call the model once before SmoothOut")
            if parameter is not None and parameter.requires_grad and parameter.is_floating_point():
                places[id(parameter)].append((module_name, module, slot))
    for tied in places.values():
        module_name, owner, slot = tied[0]
        layers = [_layer(modules, *place) for place in tied]
        layer, layer_slot = next((x for x in layers if getattr(x[0], "padding_idx", None) is not None), layers[0])
        yield Selected(_full_name(module_name, slot), owner, slot, layer, layer_slot), layers[0][0]


def _full_name(module_name: str, slot: str) -> str:
    return f"{module_name}.{slot}" if module_name else slot


def _layer(modules: dict[str, nn.Module], name: str, module: nn.Module, slot: str) -> tuple[nn.Module, str]:
    """The layer whose weight this is, and that weight's own name, under weight or spectral norm, old and new."""
    if isinstance(module, ParametrizationList):
        layer_name, _, weight = f".{name}".rpartition(".parametrizations.")
        return modules[layer_name[1:]], weight if slot in ("original", "original1") else slot
    return module, "weight" if slot in ("weight_v", "weight_orig") else slot
