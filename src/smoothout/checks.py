"""Arguments, checked: errors name the argument, its value and what would be right.

NumPy's numbers are taken like Python's, and given back as Python's, which JSON and torch know.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor, nn

DEEPSPEED = (
    "DeepSpeed keeps the weights in buffers of its own, which noise on the parameters does not reach: SmoothOut "
    "cannot train with it; use DDP or FSDP2"
)
FSDP1 = (
    "the first FSDP flattens parameters, which loses the filters, and keeps gathered copies that noise does not reach: "
    "use FSDP2 (fully_shard)"
)
DATA_PARALLEL = (
    "DataParallel copies the model in every forward, and the copies' gradients are not those of one θ: use "
    "DistributedDataParallel (start one process for each GPU, or show this one a single GPU)"
)
_UNSUPPORTED = {"DeepSpeedEngine": DEEPSPEED, "FullyShardedDataParallel": FSDP1, "DataParallel": DATA_PARALLEL}


def is_whole(value: Any) -> bool:
    """Whether this is a whole number, of Python or NumPy; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether this is a real number, of Python or NumPy; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def whole_number(name: str, value: Any, least: int = 1, why: str = "") -> int:
    """A whole number that is not below `least`."""
    if not is_whole(value) or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number of at least {least}{why}")
    return int(value)


def positive_number(name: str, value: Any, such_as: str) -> float:
    """A finite number above 0."""
    if not is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r}: give a positive number, such as {such_as}")
    return float(value)


def list_of_numbers(name: str, values: Any, such_as: str) -> tuple[float, ...]:
    """Numbers, in a list or whatever else can be gone through."""
    try:
        if isinstance(values, str):
            raise TypeError(values)
        return tuple(float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}={values!r}: give a list of numbers, such as {such_as}") from error


def seed_number(value: Any) -> int:
    """A seed, as every generator takes it."""
    if not is_whole(value):
        raise TypeError(f"seed={value!r}: give a whole number of 64 bits")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"seed={value!r}: give a whole number of 64 bits")
    return int(value)


def check_strength(value: float) -> float:
    """A strength is a finite number that is not negative."""
    if not is_number(value):
        raise TypeError(f"strength={value!r} is a {type(value).__name__}: give a number")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"strength={value!r}: give a finite number that is not negative, such as 0.0375")
    return float(value)


def scalar_loss(loss: Any) -> Tensor:
    """What a `loss_fn(model, batch)` returned, if it is one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"loss_fn(model, batch) returned {found}: give a scalar tensor, the mean loss of the batch")
    return loss.reshape(())


def check_model(model: nn.Module) -> None:
    """A module that noise reaches. Wrappers that it does not are found by class names: they need not be installed."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: give a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"model is a {type(model).__name__} of torch.jit: give the module that it was made of")
    for module in model.modules():
        for base in type(module).__mro__:
            if base.__name__ in _UNSUPPORTED:
                raise ValueError(f"model is a {base.__name__}: {_UNSUPPORTED[base.__name__]}")
