"""GhostStep on CUDA, with the forward and backward of a ghost batch replayed as one CUDA graph.

A small network's kernels are shorter than the time the host takes to launch them; a replay launches all of them at
once. Noise is added and taken back outside the graph, in the storage that the graph reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smoothout.lab.train.capture import captured, watched
from smoothout.lab.train.ghost_step import Batch, GhostStep, Seen

CALLS_BEFORE_CAPTURE = 2  # one for what is done lazily, one that is watched for waits on the device
MOST_GRAPHS = 4  # full and short last batch, twice over


@dataclass(frozen=True, eq=False)
class _Graph:
    """A captured pass: its input buffers, and where it leaves loss and right answers."""

    graph: torch.cuda.CUDAGraph
    images: Tensor
    labels: Tensor
    seen: Tensor


class GraphStep(GhostStep):
    """A GhostStep that captures the passes it sees again and again; the same training to float tolerance.

    A model that waits for the device within a pass cannot be captured: it is trained as by GhostStep, with a warning.
    Gradients keep their storage from step to step, since the graphs write to it.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._calls: dict[tuple[Any, ...], int] = {}
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._may_capture = True

    def backward(self, ghost: Batch, weight: float = 1.0) -> Seen:
        key = (ghost.images.shape, ghost.total, weight, self.model.training)
        if key in self._graphs:
            return self._replay(self._graphs[key], ghost)
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        if not self._may_capture or calls < CALLS_BEFORE_CAPTURE or len(self._graphs) == MOST_GRAPHS:
            return super().backward(ghost, weight)
        if calls == CALLS_BEFORE_CAPTURE:
            seen, self._may_capture = watched(lambda: super(GraphStep, self).backward(ghost, weight))
            return seen
        self._graphs[key] = self._captured(ghost, weight)
        return self._replay(self._graphs[key], ghost)

    def update(self) -> None:
        self._apply()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_zero_(gradients)

    def _captured(self, ghost: Batch, weight: float) -> _Graph:
        images, labels = ghost.images.clone(), ghost.labels.clone()
        graph = torch.cuda.CUDAGraph()
        with captured(graph):
            loss, correct = super().backward(Batch(images, labels, ghost.total), weight)
            seen = torch.stack([loss, correct.to(loss.dtype)])
        return _Graph(graph, images, labels, seen)

    def _replay(self, known: _Graph, ghost: Batch) -> Seen:
        known.images.copy_(ghost.images)
        known.labels.copy_(ghost.labels)
        known.graph.replay()
        return Seen(*known.seen.clone())  # the next replay writes over it
