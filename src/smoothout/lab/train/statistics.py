"""BatchNorm's running statistics, measured anew over all training images: those of training are of the last few passes.

Under noise each of these passes has noise of its own, and the statistics keep some of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from smoothout import update_bn
from smoothout.lab.train.processes import Processes


def has_statistics(model: nn.Module) -> bool:
    """Whether there are any to measure; layers that norm ghost by ghost have them too."""
    return any(isinstance(m, _BatchNorm) and m.track_running_stats for m in model.modules())


def measure_statistics(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    precision: AbstractContextManager[Any],
    processes: Processes,
) -> None:
    """Their means over these batches, of all processes; the weights and every random stream stay as they are."""
    batches = (batch for batch in batches if len(batch[1]) > 1)  # one image has no statistics
    device = next(model.parameters()).device
    # Dropout's masks must not come from the stream of training, and must be the same each time at one place.
    with torch.random.fork_rng([device] if device.type == "cuda" else []), precision:
        update_bn(model, batches)
    processes.average([b for b in model.buffers() if b.is_floating_point()])
