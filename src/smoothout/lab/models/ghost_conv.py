"""A convolution of all ghost batches at once, each with its own weights: in our kernels where they can."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from smoothout.lab.models.working_kernels import on_a_device_for_kernels, working_kernels

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_CHANNELS = 128  # one program has all outputs of its pixels
LARGEST_KERNEL = 5


def ghost_conv(x: Tensor, weight: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    """Ghost after ghost, F.conv2d with the ghost's weights.

    The kernels are for channels-last, sum in fp32 and can be differentiated once. SMOOTHOUT_KERNELS chooses as in
    `norm_relu`.

    Args:
        x: (ghosts · images) × channels × height × width.
        weight: ghosts × outputs × channels × kernel × kernel; of x's dtype.
    """
    return ghost_conv_and_around(x, weight, stride, padding)[0]


def ghost_conv_and_around(x: Tensor, weight: Tensor, stride: int = 1, padding: int = 0) -> tuple[Tensor, Tensor]:
    """The same, and x again for a path around it: where their gradients meet, the convolution's kernel adds them."""
    if on_a_device_for_kernels(x) and can_convolve(x, weight) and kernels(x.device) is not None:
        return _GhostConv.apply(x.contiguous(memory_format=torch.channels_last), weight, stride, padding)
    parts = zip(x.chunk(len(weight)), weight.unbind())
    return torch.cat([F.conv2d(part, own, stride=stride, padding=padding) for part, own in parts]), x


def is_plain(module: nn.Module) -> bool:
    """Whether it is torch's convolution with a square kernel, stride and padding, without groups, dilation or bias."""
    if type(module) is not nn.Conv2d:
        return False
    # A padding may be a word, such as "same": none whose letters are all alike.
    square = all(len(set(pair)) == 1 for pair in (module.kernel_size, module.stride, module.padding))
    dense = module.groups == 1 and set(module.dilation) == {1} and module.padding_mode == "zeros"
    return square and dense and module.bias is None


def why_no_kernels(weight: Tensor) -> str:
    """In words, why there are none for such weights; empty if there are."""
    _, outputs, channels, kernel, width = weight.shape
    if kernel != width or kernel > LARGEST_KERNEL or max(outputs, channels) > MOST_CHANNELS:
        return f"a kernel of {kernel} × {width} or more than {MOST_CHANNELS} channels"
    wanted = (kernel * kernel * channels, 1, kernel * channels, channels)
    dimensions = zip(weight.shape[1:], weight.stride()[1:], wanted)
    if any(size > 1 and stride != right for size, stride, right in dimensions):
        return "weights that are not channels-last"
    return "" if weight.dtype in _DTYPES else f"weights in {weight.dtype}"


def can_convolve(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels are made for such."""
    outputs = len(x) * max(x.shape[1], weight.shape[1]) * x.shape[2] * x.shape[3]
    return (
        not why_no_kernels(weight)
        and x.dtype == weight.dtype
        and x.device == weight.device
        and len(x) % len(weight) == 0
        and 0 < outputs < 2**31  # offsets have 32 bits; padding is less than the kernel
        and not torch.compiler.is_compiling()
    )


def kernels(device: torch.device) -> ModuleType | None:
    """None: they do not work here."""
    return working_kernels("ghost_conv_kernels", device, "each ghost is convolved by itself")


class _GhostConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor]:
        from smoothout.lab.models import ghost_conv_kernels

        ctx.save_for_backward(x, weight)
        ctx.geometry = stride, padding
        ctx.set_materialize_grads(False)
        return ghost_conv_kernels.forward(x, weight, stride, padding), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstreams: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        from smoothout.lab.models import ghost_conv_kernels as own

        x, weight = ctx.saved_tensors
        upstream, around = (g if g is None else g.contiguous(memory_format=torch.channels_last) for g in upstreams)
        if upstream is None:
            return around, None, None, None
        dx = own.input_gradient(upstream, weight, x, *ctx.geometry, added=around) if ctx.needs_input_grad[0] else None
        dw = own.weight_gradient(upstream, x, weight, *ctx.geometry) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None
