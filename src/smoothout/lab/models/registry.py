"""Networks by name, and a user's own by `module:function`."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial

from torch import nn

from smoothout.lab.models.alexnet import alexnet
from smoothout.lab.models.f1 import f1, mlp
from smoothout.lab.models.resnet import cifar_resnet, resnet18
from smoothout.lab.models.shallow import c1, c3
from smoothout.lab.nearest import nearest

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "f1": f1,
    "c1": c1,
    "c3": c3,
    **{f"resnet{depth}": partial(cifar_resnet, depth) for depth in (20, 32, 44, 56, 110)},
    "resnet18": resnet18,
    "alexnet": alexnet,
}

DEFAULT_MODELS = {"digits": "f1", "mnist": "f1", "cifar10": "c1", "cifar100": "c3"}


def default_model(dataset: str) -> str:
    """The network that a dataset of this name is trained with unless another is named; image folders take ResNet18."""
    return DEFAULT_MODELS.get(dataset, "resnet18")


def check_name(name: str) -> None:
    """Refuse a network that is neither known nor written `module:function`."""
    if ":" not in name and name not in MODELS:
        raise ValueError(f"model={name!r} is not known{nearest(name, [*MODELS, 'module:function'])}")


def build(
    name: str, *, classes: int | None = None, input_shape: tuple[int, ...] | None = None, **kwargs: object
) -> nn.Module:
    """A new network, initialised from torch's global random stream.

    Args:
        name: one of MODELS, or `module:function` for a function of yours that returns a module; it is given those of
            `classes` and `input_shape` that it takes, and the folder you are in is searched for the module too.
        classes: outputs; the network's own number where it is None.
        input_shape: C×H×W of an image; the network's own where it is None.
        kwargs: further arguments of the network, such as dropout.
    """
    shape = {"classes": classes, "input_shape": input_shape}
    given = {key: value for key, value in shape.items() if value is not None}
    check_name(name)
    if name in MODELS:
        return MODELS[name](**given, **kwargs)
    function = _function_of_user(name)
    arguments = {key: value for key, value in given.items() if _takes(function, key)} | kwargs
    try:
        # A decorator's own signature: it may give what the function inside lacks.
        inspect.signature(function, follow_wrapped=False).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"model={name!r}: {error}; it can be given {', '.join([*given, *kwargs])}") from error
    model = function(**arguments)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={name!r}: it returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def _function_of_user(name: str) -> Callable[..., object]:
    module_name, _, function_name = name.partition(":")
    # A console command does not search the current folder, where a user's module most often lies.
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"model={name!r}: there is no module {error.name!r}") from error
    finally:
        sys.path.remove(os.getcwd())
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"model={name!r}: {module_name} has no function {function_name!r}")
    return function


def _takes(function: Callable[..., object], argument: str) -> bool:
    parameters = inspect.signature(function).parameters
    return argument in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
