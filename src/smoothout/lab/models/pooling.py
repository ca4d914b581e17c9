"""Max-pooling that does not dominate a small network: torch's, of channels-last images, took half of C1's time.

Where Triton is there, a kernel of ours keeps a byte for every output, the place of the largest; elsewhere torch's own
runs. Same values, same gradients, same choice among equals.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

BLOCK = 1024  # eight elements a thread: loads of 16 bytes


class Geometry(NamedTuple):
    """A pooling's numbers, as the kernels take them."""

    channels: int
    height: int
    width: int
    out_height: int
    out_width: int
    kernel: int
    stride: int
    padding: int


class MaxPool(nn.MaxPool2d):
    """nn.MaxPool2d for square windows, fast on CUDA for channels-last images."""

    def forward(self, input: Tensor) -> Tensor:
        if not (_has_kernels(input) and self._window and input.is_contiguous(memory_format=torch.channels_last)):
            return super().forward(input)
        kernel, stride, padding = self._window
        height, width = input.shape[-2:]
        out_height, out_width = ((size + 2 * padding - kernel) // stride + 1 for size in (height, width))
        geometry = Geometry(input.shape[1], height, width, out_height, out_width, kernel, stride, padding)
        return _Pool.apply(input, geometry)

    @property
    def _window(self) -> tuple[int, ...]:
        """Size, stride and padding, where they are one number each and a place in the window fits a byte; else nothing.

        What torch refuses (a window that may lie in the padding) is left to torch too.
        """
        kernel, stride, padding = self.kernel_size, self.stride, self.padding
        if self.dilation != 1 or self.ceil_mode or self.return_indices:
            return ()
        if not (isinstance(kernel, int) and isinstance(stride, int) and isinstance(padding, int)):
            return ()
        return (kernel, stride, padding) if kernel <= 16 and 2 * padding <= kernel else ()


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, geometry: Geometry) -> Tensor:
        y, chosen = pooled(x, geometry)
        ctx.save_for_backward(chosen)
        ctx.geometry = geometry
        return y

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, None]:
        (chosen,) = ctx.saved_tensors
        return _Spread.apply(dy[0], chosen, ctx.geometry), None


class _Spread(torch.autograd.Function):
    """The backward of _Pool, with a backward of its own: curvature is measured through it."""

    @staticmethod
    def forward(ctx: Any, dy: Tensor, chosen: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(chosen)
        ctx.geometry = geometry
        return spread(dy, chosen, geometry)

    @staticmethod
    def backward(ctx: Any, *values: Tensor) -> tuple[Tensor, None, None]:
        (chosen,) = ctx.saved_tensors
        return _Pick.apply(values[0], chosen, ctx.geometry), None, None


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, chosen: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(chosen)
        ctx.geometry = geometry
        return picked(values, chosen, geometry)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, None, None]:
        (chosen,) = ctx.saved_tensors
        return _Spread.apply(dy[0], chosen, ctx.geometry), None, None


def pooled(x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The largest of each window, and its place there."""
    from smoothout.lab.models.pooling_kernels import pool_kernel

    y = _empty(x, geometry.out_height, geometry.out_width)
    chosen = _empty(x, geometry.out_height, geometry.out_width, torch.uint8)
    _launch(pool_kernel, y.numel(), (x, y, chosen), geometry)
    return y, chosen


def spread(dy: Tensor, chosen: Tensor, geometry: Geometry) -> Tensor:
    """What each output passes back, at the place it chose."""
    from smoothout.lab.models.pooling_kernels import spread_kernel

    dx = _empty(dy, geometry.height, geometry.width)
    _launch(spread_kernel, dx.numel(), (dy.contiguous(memory_format=torch.channels_last), chosen, dx), geometry)
    return dx


def picked(values: Tensor, chosen: Tensor, geometry: Geometry) -> Tensor:
    """The element of each window at the place it chose."""
    from smoothout.lab.models.pooling_kernels import pick_kernel

    y = _empty(values, geometry.out_height, geometry.out_width)
    _launch(pick_kernel, y.numel(), (values.contiguous(memory_format=torch.channels_last), chosen, y), geometry)
    return y


def _empty(like: Tensor, height: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    shape = (*like.shape[:2], height, width)
    kind: dict[str, Any] = {"dtype": dtype or like.dtype, "device": like.device}
    return torch.empty(shape, memory_format=torch.channels_last, **kind)


def _launch(kernel: Any, elements: int, tensors: tuple[Tensor, ...], geometry: Geometry) -> None:
    if elements:
        blocks = -(-elements // BLOCK)
        names = ("C", "H", "W", "OH", "OW", "KERNEL", "STRIDE", "PADDING")
        kernel[(blocks,)](*tensors, elements, **dict(zip(names, geometry)), BLOCK=BLOCK)


def _has_kernels(x: Tensor) -> bool:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    fits = x.numel() < 2**31  # places are numbers of 32 bits
    return (x.is_cuda or interpreted) and x.dtype != torch.float64 and fits and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
