"""Flat-minima training for PyTorch: SmoothOut, AdaSmoothOut and N-copy SmoothOut (Wen et al., 2018).

smooth = AdaSmoothOut(model, strength=0.15)
with smooth.perturbed():
    loss_fn(model(x), y).backward()
optimizer.step()
"""

from typing import TYPE_CHECKING, Any

from smoothout import schedule
from smoothout.attach import Attachment
from smoothout.batchnorm import frozen_statistics, update_bn
from smoothout.ensemble import SmoothOutEnsemble
from smoothout.noise import Bernoulli, Gaussian, Noise, Rademacher, Uniform
from smoothout.smooth import AdaSmoothOut, SmoothOut

if TYPE_CHECKING:
    from smoothout import measure as measure
    from smoothout.measure import suggest_strength as suggest_strength

__version__ = "0.1.0.dev0"

__all__ = [
    "SmoothOut",
    "AdaSmoothOut",
    "SmoothOutEnsemble",
    "Attachment",
    "Noise",
    "Uniform",
    "Gaussian",
    "Rademacher",
    "Bernoulli",
    "schedule",
    "frozen_statistics",
    "update_bn",
    "__version__",
]
_LAZY = ("measure", "suggest_strength")  # need scipy: not in __all__, so that a star import does not load it


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def __getattr__(name: str) -> Any:
    """`measure` needs scipy: it is imported when it is first used."""
    if name in _LAZY:
        import importlib

        measure = importlib.import_module("smoothout.measure")
        return measure if name == "measure" else measure.suggest_strength
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
