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
from smoothout.lab.models.resnet import BasicBlock, ResNet, Stem
from smoothout.lab.models.working_kernels import on_a_device_for_kernels


class FoldedResNet:
    """The network with the weights and statistics that it has now, in another precision.

    Args:
        model: one for which `why_no_stack` has nothing to say.
        dtype: of images and weights; sums are in fp32.
    """

    def __init__(self, model: ResNet, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        convolution, norm, *others = cast(Stem, self._model.stem)
        x = self._layer(convolution, norm, images.to(self._dtype))
        for layer in others:
            x = layer(x)
        for stage in self._model.stages:
            for block in cast(nn.Sequential, stage):
                x = self._block(cast(BasicBlock, block), x)
        return self._model.classifier(self._model.pool(x).flatten(1))

    def _block(self, block: BasicBlock, x: Tensor) -> Tensor:
        inner, shortcut = self._layer(block.conv1, block.bn1, x), x
        if isinstance(block.shortcut, nn.Sequential):
            shortcut = self._layer(block.shortcut[0], block.shortcut[1], x, relu=False)
        return self._layer(block.conv2, block.bn2, inner, shortcut)

    def _layer(
        self, layer: nn.Module, norm: nn.Module, x: Tensor, residual: Tensor | None = None, relu: bool = True
    ) -> Tensor:
        layer, norm = cast(nn.Conv2d, layer), cast(nn.BatchNorm2d, norm)
        mean, variance = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
        factor = norm.weight * torch.rsqrt(variance + norm.eps)
        shift = torch.addcmul(norm.bias, mean, factor, value=-1)
        weight = (layer.weight * factor[:, None, None, None]).to(self._dtype, memory_format=torch.channels_last)
        return convolve(x, weight, shift, layer.stride[0], cast(int, layer.padding[0]), residual, relu)


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
