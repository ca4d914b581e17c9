"""A convolution of images of three channels, of which cuDNN pads every pixel to eight: here to four, in our kernels.

In C1 this layer took a quarter of a training step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from smoothout.lab.models.ghost_conv import LARGEST_KERNEL, MOST_CHANNELS, ghost_conv, is_plain, kernels
from smoothout.lab.models.norm_relu import has_hooks
from smoothout.lab.models.working_kernels import on_a_device_for_kernels

_CHANNELS = 4  # of bf16: eight bytes a pixel, which can be fetched ahead


def image_conv(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """`conv(x)`; in training under autocast by kernels that can be differentiated once. SMOOTHOUT_KERNELS chooses."""
    if not _can(conv, x):
        return conv(x)
    dtype = torch.get_autocast_dtype(x.device.type)
    missing = (0, 0, 0, 0, 0, _CHANNELS - x.shape[1])
    images, weight = (
        F.pad(t.to(dtype), missing).contiguous(memory_format=torch.channels_last) for t in (x, conv.weight)
    )
    padding = conv.padding[0]
    assert isinstance(padding, int)
    return ghost_conv(images, weight[None], conv.stride[0], padding)


def _can(conv: nn.Conv2d, x: Tensor) -> bool:
    # As in `norm_relu`: first what costs least, and what may be asked inside a transform.
    if torch.compiler.is_compiling() or not conv.training or not on_a_device_for_kernels(x):
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    if not torch.is_autocast_enabled(x.device.type) or torch.is_inference_mode_enabled() or has_hooks(conv):
        return False
    return (
        is_plain(conv)
        and conv.kernel_size[0] <= LARGEST_KERNEL
        and conv.out_channels <= MOST_CHANNELS
        and x.dim() == 4
        and x.shape[1] == conv.in_channels <= _CHANNELS
        and all(type(t) in (Tensor, nn.Parameter) and t.is_floating_point() for t in (x, conv.weight))
        and kernels(x.device) is not None
    )
