"""Which parameters take noise."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import UninitializedParameter

Predicate = Callable[[str, nn.Parameter, nn.Module], bool]

# Other libraries' layers (LlamaRMSNorm, T5LayerNorm, LayerNorm2d, …) are found by the name of a class they derive from.
_NORM_CLASS_NAME = re.compile(r"Norm([123]d)?$")
# Names that wrappers (DDP, torch.compile, checkpointing) put in front of a parameter's own.
_WRAPPER_PREFIX = re.compile(r"(^|(?<=\.))(module|_orig_mod|_checkpoint_wrapped_module)\.")


@dataclass(frozen=True)
class Selected:
    """A parameter that takes noise, with the module that owns it: the owner's slot is where it is read at each draw."""

    name: str
    owner: nn.Module
    slot: str

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


def is_normalisation(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer, torch's own or another library's, by its class."""
    return any(_NORM_CLASS_NAME.search(cls.__name__) for cls in type(module).__mro__)


def not_normalisation(name: str, parameter: nn.Parameter, module: nn.Module) -> bool:
    """The default: every parameter but the scales and shifts of normalisation layers."""
    return not is_normalisation(module)


def everything(name: str, parameter: nn.Parameter, module: nn.Module) -> bool:
    """Every parameter, those of normalisation layers too (as the authors' runs until 2018-11)."""
    return True


def select_parameters(model: nn.Module, predicate: Predicate | None = None) -> list[Selected]:
    """The trainable floating-point parameters for which the predicate holds, tied ones once, in the model's order."""
    predicate = not_normalisation if predicate is None else predicate
    if not callable(predicate):
        raise TypeError(f"select={predicate!r} is not callable: give a function (name, parameter, module) -> bool")
    return [selected for selected in _trainable(model) if predicate(selected.name, selected.parameter, selected.owner)]


def _trainable(model: nn.Module) -> Iterator[Selected]:
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for slot, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if isinstance(parameter, UninitializedParameter):
                raise ValueError(f"{module_name}.{slot} has no shape yet: call the model once before SmoothOut")
            if parameter.requires_grad and parameter.is_floating_point():
                yield Selected(f"{module_name}.{slot}" if module_name else slot, module, slot)
