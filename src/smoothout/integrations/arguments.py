"""What the three integrations share: the arguments of SmoothOut, taken before there is a model, and what to say when a
framework is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import nn

from smoothout.attach import check_draw
from smoothout.extras import install
from smoothout.filters import Scale
from smoothout.noise import Noise
from smoothout.schedule import Schedule
from smoothout.select import Predicate
from smoothout.smooth import SmoothOut


class Arguments(TypedDict, total=False):
    """SmoothOut's keywords, see there."""

    noise: str | Noise
    scale: str | Scale
    schedule: Schedule | None
    select: Predicate | None
    seed: int
    denoise: bool
    shared_noise: bool


def check_arguments(strength: float, draw: str, arguments: Mapping[str, Any]) -> None:
    """Raise for a bad argument now rather than when training starts, hours later in a queue."""
    anything = nn.ParameterList([torch.zeros(1)])
    SmoothOut(anything, strength, **{name: value for name, value in arguments.items() if name != "select"})
    check_draw(draw)
    if arguments.get("select") is not None and not callable(arguments["select"]):
        raise TypeError(f"select={arguments['select']!r} is not callable: give (name, parameter, module) -> bool")


def missing(package: str, extra: str) -> ImportError:
    """The error for a framework that is not installed."""
    return ImportError(f"smoothout.integrations.{extra} needs {package}: {install(extra)}")
