"""A ResNet as it is judged: every BatchNorm is folded into its convolution, and a layer is one launch.

In evaluation mode BatchNorm multiplies and shifts each channel by what is known before: that goes into the weights, and
the kernel adds the shift and the shortcut and takes the ReLU. Each of these is a pass over the images in torch.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smoothout.lab.models.ghost_conv import can_convolve, kernels
from smoothout.lab.models.resnet import ResNet, Walk
from smoothout.lab.models.working_kernels import on_a_device_for_kernels


class FoldedResNet(Walk):
    """The network with the weights and statistics that it has now, in another precision.

    Args:
        model: one for which `why_no_stack` has nothing to say.
        dtype: of images and weights; sums are in fp32.
    """

    def __init__(self, model: ResNet, dtype: torch.dtype) -> None:
        super().__init__(model)
        self._dtype = dtype

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        return super().__call__(images.to(self._dtype))

    def _layer(
        self, layer: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor, residual: Tensor | None = None, relu: bool = True
    ) -> Tensor:
        mean, variance = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
        factor = norm.weight * torch.rsqrt(variance + norm.eps)
        shift = torch.addcmul(norm.bias, mean, factor, value=-1)
        weight = (layer.weight * factor[:, None, None, None]).to(self._dtype, memory_format=torch.channels_last)
        return convolve(x, weight, shift, layer.stride[0], cast(int, layer.padding[0]), residual, relu)

    def _last(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return layer(x)


def convolve(
    x: Tensor, weight: Tensor, shift: Tensor, stride: int, padding: int, residual: Tensor | None, relu: bool
) -> Tensor:
    """relu(conv(x) + shift + residual), rounded once where our kernel can do it; nothing is kept for a backward."""
    if on_a_device_for_kernels(x) and can_convolve(x, weight[None]) and (own := kernels(x.device)) is not None:
        x = x.contiguous(memory_format=torch.channels_last)
        return own.forward(x, weight[None], stride, padding, residual, shift, relu)
    y = F.conv2d(x, weight, stride=stride, padding=padding) + shift.to(x.dtype)[:, None, None]
    y = y if residual is None else y + residual
    return F.relu(y) if relu else y
