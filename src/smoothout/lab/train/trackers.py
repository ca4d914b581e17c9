"""Where metrics go besides the run folder: nowhere, or to TensorBoard."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smoothout.extras import install

if TYPE_CHECKING:
    from smoothout.lab.runs import EpochMetrics


class Tracker:
    """Told of every epoch; keeps what it likes, here nothing."""

    def log(self, metrics: EpochMetrics) -> None: ...
    def close(self) -> None: ...


class TensorBoard(Tracker):
    """One event file a start; an epoch that is trained again after an interruption replaces the earlier point."""

    def __init__(self, folder: Path, first_epoch: int = 1) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(f"--tensorboard needs the extra: {install('tensorboard')}") from error
        # Not opened before there is something to write: a folder with event files alone would not pass for a run's.
        self._open = partial(SummaryWriter, str(folder), purge_step=first_epoch)
        self._writer: Any = None

    def log(self, metrics: EpochMetrics) -> None:
        if self._writer is None:
            self._writer = self._open()
        for name, value in asdict(metrics).items():
            if value is not None and name != "epoch":
                self._writer.add_scalar(name, value, metrics.epoch)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
