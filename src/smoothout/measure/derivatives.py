"""First and second derivatives of a loss by autograd, for every layer and without touching `.grad`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def recurrent_derivatives(model: nn.Module) -> Iterator[None]:
    """cuDNN's recurrent layers have no derivative in eval mode, and no second one in any: torch's own stand in."""
    cudnn = torch.backends.cudnn
    before = cudnn.enabled
    try:
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            cudnn.enabled = False
        yield
    finally:
        cudnn.enabled = before


@contextmanager
def second_order() -> Iterator[None]:
    """Fused attention kernels and compiled code have no second derivative: inside, neither is used."""
    compiler_loaded = "torch._dynamo" in sys.modules  # to load it takes seconds
    with sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager") if compiler_loaded else nullcontext():
        yield


def gradients_of(
    loss: Tensor, inputs: list[Any], create_graph: bool = False, reached: set[int] | None = None
) -> list[Tensor]:
    """∂loss/∂inputs without touching `.grad`; zero where no graph leads. `reached` takes the numbers of the others."""
    if not loss.requires_grad:
        return [torch.zeros_like(p) for p in inputs]
    gradients = torch.autograd.grad(loss, inputs, create_graph=create_graph, allow_unused=True)
    if reached is not None:
        reached.update(i for i, g in enumerate(gradients) if g is not None)
    # An embedding with sparse=True has sparse gradients.
    return [torch.zeros_like(p) if g is None else g.to_dense() for g, p in zip(gradients, inputs)]


def second_derivatives(
    loss: Tensor, inputs: list[Any], direction: list[Tensor], reached: set[int] | None = None
) -> list[Tensor]:
    """H·v by differentiating ∇loss·v."""
    gradients = gradients_of(loss, inputs, create_graph=True, reached=reached)
    along = [(g * v).sum() for g, v in zip(gradients, direction)]
    return gradients_of(torch.stack([a.to(along[0]) for a in along]).sum(), inputs)
