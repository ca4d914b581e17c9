"""What a filter is, its norm, and how raw noise is scaled: one definition for training, landscapes and summaries.

A filter is the set of weights that feed one output: a row of a Linear, an output channel of a convolution. For 0-D and
1-D tensors (biases) every element is a filter of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd


@dataclass(frozen=True)
class FilterLayout:
    """How a parameter's tensor divides into filters.

    Args:
        axis: `"element"`, or the dimension that counts outputs: 0, or 1 for layers that store (inputs, outputs).
        groups: of a transposed convolution: blocks of dimension 0 that feed different outputs.
        clean_row: a row of dimension 0 that never takes noise (`padding_idx` of an embedding).
    """

    axis: Literal["element", 0, 1]
    groups: int = 1
    clean_row: int | None = None

    def count(self, shape: torch.Size) -> int:
        """The number of filters in a tensor of this shape."""
        if self.axis == "element":
            return shape.numel()
        return shape[self.axis] * (self.groups if self.axis == 1 else 1)


def filter_layout(module: nn.Module, slot: str, parameter: Tensor) -> FilterLayout:
    """The layout of `module.<slot>`: dimension 0, but 1 for transposed convolutions and Transformers' `Conv1D`."""
    if parameter.ndim < 2:
        return FilterLayout("element")
    if slot == "weight":
        if isinstance(module, _ConvTransposeNd) and parameter.shape[0] == module.in_channels:
            return FilterLayout(1, groups=module.groups)
        if any(cls.__name__ == "Conv1D" for cls in type(module).__mro__) and parameter.ndim == 2:
            return FilterLayout(1)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.padding_idx is not None:
            return FilterLayout(0, clean_row=module.padding_idx % parameter.shape[0])
    return FilterLayout(0)


def precision(tensor: Tensor) -> torch.dtype:
    """The dtype in which a tensor's norms and noise are computed: its own, but fp32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def filter_norms(tensor: Tensor, layout: FilterLayout, dtype: torch.dtype | None = None) -> Tensor:
    """‖wᵢ‖₂ of every filter, in at least fp32, shaped to broadcast against the tensor.

    Filters that span several ranks add up `squared_sums` instead.
    """
    dtype = precision(tensor) if dtype is None else dtype
    tensor = tensor.detach() if tensor.requires_grad else tensor
    if layout.axis == "element":
        return tensor.to(dtype).abs()
    if layout.axis == 0:
        return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True, dtype=dtype)
    return spread(squared_sums(tensor, layout, dtype).sqrt(), tensor, layout)


def squared_sums(
    tensor: Tensor, layout: FilterLayout, dtype: torch.dtype, first_row: int = 0, rows: int | None = None
) -> Tensor:
    """Per-filter sums of squares of a part of a tensor: sums over the parts add up to the whole's.

    Args:
        first_row: where the part starts in the whole tensor's dimension 0.
        rows: the whole tensor's size in dimension 0; by default that of `tensor`.

    Returns:
        `(rows of the part,)` for axis 0, `(groups, outputs)` for axis 1.
    """
    axis = layout.axis
    assert axis != "element", "every element is a whole filter: nothing to add up"
    squares = tensor.detach().to(dtype).square()
    per_row = squares.sum(dim=tuple(range(axis + 1, tensor.ndim))) if tensor.ndim > axis + 1 else squares
    if axis == 0:
        return per_row
    sums = per_row.new_zeros(layout.groups, tensor.shape[1])
    return sums.index_add_(0, _group_of_row(tensor, layout, first_row, rows), per_row)


def spread(
    per_filter: Tensor, tensor: Tensor, layout: FilterLayout, first_row: int = 0, rows: int | None = None
) -> Tensor:
    """Per-filter values, shaped as `squared_sums` returns them, made to broadcast against the tensor."""
    if layout.axis == 1:
        per_filter = per_filter[_group_of_row(tensor, layout, first_row, rows)]
    return per_filter.reshape(*per_filter.shape, *[1] * (tensor.ndim - per_filter.ndim))


def _group_of_row(tensor: Tensor, layout: FilterLayout, first_row: int, rows: int | None) -> Tensor:
    group_size = (tensor.shape[0] if rows is None else rows) // layout.groups
    return torch.arange(first_row, first_row + tensor.shape[0], device=tensor.device) // group_size


# Below this a norm in fp32 has underflowed: the filter counts as zero, and 0 · (‖w‖ / SMALLEST_NORM) is 0.
SMALLEST_NORM = 1e-20


@dataclass(frozen=True)
class Absolute:
    """θ = a·n: the paper's SmoothOut."""


@dataclass(frozen=True)
class Weight:
    """θ = a·w·n, element by element."""


@dataclass(frozen=True)
class Filter:
    """θ̂ᵢ = a·‖wᵢ‖/‖nᵢ‖·nᵢ for every filter i: AdaSmoothOut.

    Args:
        epsilon: added to ‖nᵢ‖. The authors' code has 1e−6 there; by default nothing is added and the norm is exact.
    """

    epsilon: float = 0.0


Scale = Absolute | Weight | Filter
NAMES: dict[str, type[Absolute] | type[Weight] | type[Filter]] = {
    "absolute": Absolute,
    "weight": Weight,
    "filter": Filter,
}


def as_scale(scale: str | Scale) -> Scale:
    """A scale from its name, or the object itself."""
    if isinstance(scale, str) and scale in NAMES:
        return NAMES[scale]()
    if isinstance(scale, Absolute | Weight | Filter):
        return scale
    raise ValueError(f"scale={scale!r} is not known: use one of {sorted(NAMES)}")
