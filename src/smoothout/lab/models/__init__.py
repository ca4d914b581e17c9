"""The networks of the paper, ghost batch normalisation, and a registry."""

from smoothout.lab.models.ghost_norm import (
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    chunk_count,
    chunk_sizes,
    ghost_sizes,
    with_ghost_norm,
)
from smoothout.lab.models.registry import MODELS, build, check_name, default_model

__all__ = [
    "MODELS",
    "GhostBatchNorm1d",
    "GhostBatchNorm2d",
    "build",
    "check_name",
    "chunk_count",
    "chunk_sizes",
    "default_model",
    "ghost_sizes",
    "with_ghost_norm",
]
