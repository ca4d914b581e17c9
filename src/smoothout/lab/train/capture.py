"""CUDA graphs that may run at the same time as others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


@contextmanager
def captured(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture what is begun within, on memory that no other graph uses.

    torch keeps the scratch memory of cuBLAS by stream, and graphs are captured on the same streams again and again: a
    second graph would have the scratch of the first in it. Replayed side by side they write over each other's sums
    (pytorch issue 193402). So each finds no scratch there, takes its own out of its own pool, and leaves none behind.
    """
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def watched(function: Callable[[], T]) -> tuple[T, bool]:
    """Run it; what it gives, and whether the host never waits for the device in it, which no graph can hold."""
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            result = function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    can_be_captured = not any("synchronizing CUDA operation" in str(wait.message) for wait in waits)
    if not can_be_captured:
        warnings.warn("the model waits for the device within a pass: it is trained without CUDA graphs", stacklevel=3)
    return result, can_be_captured
