"""ReLU(BatchNorm(x) + residual) in fused kernels where they can, and by torch's own operations elsewhere.

The kernels are for training on CUDA in channels-last, where these three take half of a small ResNet's time.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from smoothout.lab.models.working_kernels import on_a_device_for_kernels, working_kernels

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CHANNELS = (8, 16, 32, 64, 128, 256)


def norm_relu(norm: nn.BatchNorm2d, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """`F.relu(norm(x) + residual)`, with or without a residual.

    The kernels sum in fp32 and round once; they can be differentiated once (a second time raises). SMOOTHOUT_KERNELS
    chooses: "auto" (the default): where they can; "fused": also in Triton's interpreter; "foreach": never.
    """
    if _can_fuse(norm, x, residual) and kernels_of_norms(x.device) is not None:
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
        statistics = (norm.running_mean, norm.running_var, norm.momentum, norm.eps)
        return _NormReLU.apply(x, residual, norm.weight, norm.bias, *statistics)
    y = norm(x)
    return F.relu(y if residual is None else y + residual, inplace=True)


def _can_fuse(norm: nn.BatchNorm2d, x: Tensor, residual: Tensor | None) -> bool:
    # First what costs least: torch.compile fuses by itself and must not trace further.
    if torch.compiler.is_compiling() or not norm.training or not on_a_device_for_kernels(x):
        return False
    # Before anything is asked of x: inside a transform not all of it can be answered.
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    if type(norm) is not nn.BatchNorm2d or not norm.affine or not norm.track_running_stats:
        return False
    if not isinstance(norm.momentum, (int, float)) or has_hooks(norm):
        return False
    vectors = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    return (
        can_take_images(x, residual)
        and norm.num_features == x.shape[1]
        and x.numel() > x.shape[1]  # torch refuses one value a channel
        and all(t is not None and t.dtype == torch.float32 and t.device == x.device for t in vectors)
        and all(t is not None and t.is_contiguous() and type(t) in (Tensor, nn.Parameter) for t in vectors)
        and not torch.is_inference_mode_enabled()
    )


def can_take_images(x: Tensor, residual: Tensor | None) -> bool:
    """Whether the kernels are made for such."""
    images = (x,) if residual is None else (x, residual)
    return (
        x.dim() == 4
        and x.dtype in _DTYPES
        and x.shape[1] in _CHANNELS
        and x.numel() < 2**31  # offsets have 32 bits
        and all(type(t) is Tensor and t.dtype == x.dtype and t.shape == x.shape for t in images)
        and all(t.is_contiguous(memory_format=torch.channels_last) and t.device == x.device for t in images)
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether something wants to see its passes."""
    forward, backward = (module._forward_hooks, module._forward_pre_hooks), module._backward_pre_hooks
    return bool(any(forward) or module._backward_hooks or backward)


def kernels_of_norms(device: torch.device) -> ModuleType | None:
    """None: they do not work here."""
    return working_kernels("norm_relu_kernels", device, "BatchNorm takes more kernels")


class _NormReLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_variance: Tensor,
        momentum: float,
        epsilon: float,
    ) -> Tensor:
        from smoothout.lab.models import norm_relu_kernels

        y, saved = norm_relu_kernels.forward(
            x, residual, weight, bias, running_mean, running_variance, float(momentum), epsilon
        )
        torch.autograd.graph.increment_version((running_mean, running_variance))
        # The weight itself is not needed, but if it moves before the backward pass torch shall raise, as it does for
        # its own BatchNorm.
        ctx.save_for_backward(x, None if residual is None else y, saved, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        from smoothout.lab.models import norm_relu_kernels

        x, y, saved, _ = ctx.saved_tensors
        # After pooling it is one value, expanded.
        upstream = upstreams[0].contiguous(memory_format=torch.channels_last)
        dx, gradient, dweight, dbias = norm_relu_kernels.backward(upstream, x, y, saved)
        return dx, gradient, dweight[0], dbias[0], None, None, None, None
