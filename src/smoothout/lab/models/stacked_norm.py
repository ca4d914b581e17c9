"""BatchNorm of all ghost batches at once, each by its own statistics, with a sum and ReLU: fused where that can be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from smoothout.lab.models.norm_relu import can_take_images, kernels_of_norms
from smoothout.lab.models.working_kernels import on_a_device_for_kernels


def stacked_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    statistics: tuple[Tensor, Tensor],
    epsilon: float,
    residual: Tensor | None = None,
    relu: bool = True,
) -> Tensor:
    """Ghost after ghost, relu(BatchNorm(x) + residual) in training.

    Args:
        x: (ghosts · images) × channels × height × width.
        weight: ghosts × channels, as bias; ghosts may share theirs (a stride of 0).
        statistics: take every ghost's mean and unbiased variance; ghosts × channels.
        relu: without it, only BatchNorm and the sum.
    """
    if _can_fuse(x, weight, bias, statistics, residual) and kernels_of_norms(x.device) is not None:
        return _StackedNorm.apply(x, residual, weight, bias, *statistics, epsilon, relu)
    ghosts = zip(x.chunk(len(weight)), weight.unbind(), bias.unbind(), *(t.unbind() for t in statistics))
    y = torch.cat([F.batch_norm(part, mean, var, w, b, True, 1.0, epsilon) for part, w, b, mean, var in ghosts])
    y = y if residual is None else y + residual
    return F.relu(y) if relu else y


def _can_fuse(
    x: Tensor, weight: Tensor, bias: Tensor, statistics: tuple[Tensor, Tensor], residual: Tensor | None
) -> bool:
    vectors = (weight, bias, *statistics)
    return (
        on_a_device_for_kernels(x)
        and not torch.compiler.is_compiling()
        and can_take_images(x, residual)
        and x.numel() > len(weight) * x.shape[1]  # one value a channel has no variance: torch shall say so
        and all(t.dtype == torch.float32 and t.device == x.device and t.stride(1) == 1 for t in vectors)
        and statistics[0].stride(0) == statistics[1].stride(0)
    )


class _StackedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        epsilon: float,
        relu: bool,
    ) -> Tensor:
        from smoothout.lab.models import norm_relu_kernels

        y, saved = norm_relu_kernels.forward(x, residual, weight, bias, mean, variance, 1.0, epsilon, relu)
        torch.autograd.graph.increment_version((mean, variance))
        ctx.save_for_backward(x, None if residual is None else y, saved)
        ctx.relu = relu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        from smoothout.lab.models import norm_relu_kernels

        x, y, saved = ctx.saved_tensors
        upstream = upstreams[0].contiguous(memory_format=torch.channels_last)  # after pooling it is expanded
        return *norm_relu_kernels.backward(upstream, x, y, saved, ctx.relu), None, None, None, None
