"""A table of what the noise does to each tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from smoothout.filters import filter_layout
from smoothout.perturb import Perturbation


@dataclass(frozen=True)
class TensorSummary:
    """One perturbed tensor: its filters, the noise of one draw, and their ratio."""

    name: str
    shape: tuple[int, ...]
    filters: int
    noise_norm: float
    weight_norm: float

    @property
    def ratio(self) -> float:
        """‖θ‖/‖w‖; infinite for a tensor of zeros that takes noise, 0 where both are zero."""
        if self.weight_norm == 0.0:
            return float("inf") if self.noise_norm > 0.0 else 0.0
        return self.noise_norm / self.weight_norm


@dataclass(frozen=True)
class Summary:
    """A table per tensor; `print` it, or read `.tensors`."""

    strength: float
    tensors: tuple[TensorSummary, ...]

    def __str__(self) -> str:
        width = max([len("tensor"), *(len(t.name) for t in self.tensors)])
        lines = [f"{'tensor':<{width}}  {'shape':<18} {'filters':>8} {'‖θ‖':>10} {'‖w‖':>10} {'‖θ‖/‖w‖':>9}"]
        for t in self.tensors:
            shape = "×".join(map(str, t.shape)) or "scalar"
            row = f"{t.filters:>8} {t.noise_norm:>10.4g} {t.weight_norm:>10.4g} {t.ratio:>9.4f}"
            lines.append(f"{t.name:<{width}}  {shape:<18} {row}")
        return "\n".join([*lines, f"strength {self.strength:g}, {len(self.tensors)} tensors"])


def summarise(perturbation: Perturbation, strength: float, step: int) -> Summary:
    """Draw once without touching the weights (this rank's shards of a sharded tensor) and measure."""
    rows = []
    for selected, weight, noise in zip(
        perturbation.selected, perturbation.local_weights, perturbation.draw(strength, step)
    ):
        parameter = selected.parameter
        count = filter_layout(selected.layer, selected.layer_slot, parameter).count(parameter.shape)
        norms = (float(torch.linalg.vector_norm(t.double())) for t in (noise, weight))
        rows.append(TensorSummary(selected.name, tuple(parameter.shape), count, *norms))
    return Summary(strength, tuple(rows))
