"""The networks of the paper, ghost batch normalisation, and a registry."""

from .ghost_norm import GhostBatchNorm1d, GhostBatchNorm2d, chunk_count, chunk_sizes, ghost_sizes, with_ghost_norm
from .registry import MODELS, build, check_name, default_model

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
