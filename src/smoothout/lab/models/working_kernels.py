"""Triton kernels of the networks, where they are wanted and work."""

from __future__ import annotations

import importlib
import os
import warnings
from functools import cache
from types import ModuleType

import torch
from torch import Tensor


def on_a_device_for_kernels(x: Tensor) -> bool:
    """As SMOOTHOUT_KERNELS chooses."""
    wanted = os.environ.get("SMOOTHOUT_KERNELS", "auto")
    if x.is_cuda:
        return wanted != "foreach" and x.get_device() == torch.cuda.current_device()
    return wanted == "fused" and os.environ.get("TRITON_INTERPRET") == "1" and x.device.type == "cpu"


@cache
def working_kernels(name: str, device: torch.device, otherwise: str) -> ModuleType | None:
    """A module of kernels, imported at the first use: Triton is not everywhere, and takes its time. None: not here.

    Args:
        name: of a module of this package that has `rehearse(device)`.
        otherwise: what is done without it, for the warning.
    """
    try:
        module = importlib.import_module(f"smoothout.lab.models.{name}")
    except ImportError:
        return None
    try:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return None
        module.rehearse(device)
    except Exception as error:
        warnings.warn(f"Triton does not work here, so {otherwise}: {error!r}", stacklevel=3)
        return None
    return module
