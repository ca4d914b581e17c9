"""What batches may be, how much each weighs, and whether one is the same again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def check_batches(batches: Any) -> None:
    """Something to go through several times."""
    if isinstance(batches, Iterator):
        raise ValueError(
            f"batches is a {type(batches).__name__}, an iterator: it is exhausted after one pass, if not already. "
            "Several passes are needed: give a list or a DataLoader, which start anew each time"
        )
    if isinstance(batches, Mapping):
        raise TypeError(f"batches is a {type(batches).__name__}, one batch? Give a list of batches: [batch]")
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise TypeError(f"batches is a {type(batches).__name__}: give a list of batches or a DataLoader")


def weight_of(batch: Any) -> int:
    """The length of the batch's first tensor, 1 if it has none."""
    first = next(tensors_of(batch), None)
    return first.size(0) if first is not None and first.ndim else 1  # nested tensors have no len()


def tensors_of(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):  # such as Transformers' BatchEncoding, which is no dict
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from tensors_of(value)


def sample_of(batch: Any) -> list[Tensor]:
    """A few thousand numbers of each tensor, to know the batch again by."""
    samples = []
    for tensor in tensors_of(batch):
        if tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_complex() or tensor.is_quantized):
            flat = tensor.detach().reshape(-1)
            samples.append(flat[:: max(1, len(flat) // 4096)].to("cpu", torch.float64, copy=True))
    return samples


def alike(first: list[Tensor], again: list[Tensor]) -> bool:
    """Whether these are samples of the same numbers, perhaps in another dtype; loss_fn may have added tensors."""
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-2, atol=0.0, equal_nan=True) for a, b in zip(first, again)
    )
