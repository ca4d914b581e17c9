"""One task of the queue, carried out: train, then measure while the weights are at hand."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from smoothout.lab import measurements
from smoothout.lab.data import DataError
from smoothout.lab.experiments.queue import Task, folder_of
from smoothout.lab.experiments.records import look
from smoothout.lab.experiments.speeds import Speeds
from smoothout.lab.experiments.vocabulary import Measuring
from smoothout.lab.files import RunError
from smoothout.lab.runs import LAST_WEIGHTS, RESULT
from smoothout.lab.train.loop import Diverged
from smoothout.lab.train.start import Options, attempt, summary, train
from smoothout.lab.train.stop import TRY_AGAIN, Interrupted
from smoothout.lab.trained import Trained, load_trained

CHECKPOINT_EVERY = 50  # epochs; a stop makes one in any case, so that this is for machines that die
STOPPED = "stopped by a signal. The same command goes on from there."
EXPECTED = (Interrupted, RunError, DataError, ValueError, OSError, RuntimeError)


@dataclass(frozen=True)
class Place:
    """Where and how tasks are carried out.

    Args:
        deadline: by the clock (`time.time`), the same for all processes; None: there is none.
        threads: of torch; None: as many as it likes.
        together: runs that share a GPU, in turns; None: five of a small network, one of any other.
    """

    out: Path
    data_root: Path | None = None
    device: str = "auto"
    deadline: float | None = None
    threads: int | None = None
    speeds: Speeds = field(default_factory=Speeds)
    together: int | None = None

    @property
    def seconds_left(self) -> float:
        return float("inf") if self.deadline is None else self.deadline - time.time()


@dataclass(frozen=True)
class Outcome:
    """What came of a task: done, or in words why not.

    Args:
        state: "out of time" and "interrupted" go on with the next call; "diverged" is a result; "failed" is a fault.
    """

    task: Task
    state: Literal["done", "out of time", "interrupted", "diverged", "failed"]
    message: str

    @property
    def stops_the_queue(self) -> bool:
        return self.state in ("out of time", "interrupted")


def carry_out(task: Task, place: Place) -> Outcome:
    """Do a task. What can go wrong with one run is an outcome, and the queue goes on."""
    if place.threads is not None:
        torch.set_num_threads(place.threads)
    try:
        if place.seconds_left <= 0:
            return Outcome(task, "out of time", "not begun")
        return _line(task, place) if task.line else _run(task, place)
    except EXPECTED as error:
        return _outcome_of(error, task)
    except KeyboardInterrupt:  # in training a checkpoint comes first, and this is Interrupted
        return Outcome(task, "interrupted", STOPPED)
    finally:
        _free_memory()


def carry_out_together(tasks: Sequence[Task], place: Place) -> list[Outcome]:
    """Train several runs side by side on one GPU, then measure one after another."""
    for task in tasks:
        _begin_again_without_weights(task, place)
    try:
        ended = attempt([task.config for task in tasks], lambda config: folder_of(place.out, config), _options(place))
    except EXPECTED as error:
        return [_outcome_of(error, task) for task in tasks]
    except KeyboardInterrupt:  # a second signal
        return [Outcome(task, "interrupted", STOPPED) for task in tasks]
    finally:
        _free_memory()
    outcomes = []
    for task, end in zip(tasks, ended):
        outcomes.append(_outcome_of(end, task) if isinstance(end, Exception) else carry_out(task, place))
    return outcomes


def _outcome_of(error: Exception, task: Task) -> Outcome:
    if isinstance(error, Interrupted):
        return Outcome(task, "out of time" if error.exit_code == TRY_AGAIN else "interrupted", str(error))
    if isinstance(error, Diverged):
        return Outcome(task, "diverged", str(error))
    return Outcome(task, "failed", f"{type(error).__name__}: {error}")


def _free_memory() -> None:
    if torch.cuda.is_available():
        gc.collect()  # graphs and networks refer to each other; the next run wants their memory


def _options(place: Place) -> Options:
    minutes = None if place.deadline is None else max(0.0, place.seconds_left) / 60
    return Options(place.data_root, place.device, CHECKPOINT_EVERY, minutes, together=place.together, quiet=True)


def _run(task: Task, place: Place) -> Outcome:
    folder = folder_of(place.out, task.config)
    _begin_again_without_weights(task, place)
    record = train(task.config, folder, _options(place))
    there = look(folder)
    loaded: dict[int | None, Trained] = {}  # by the images it is measured on
    for wanted in task.measurements:
        if there.has(wanted):
            continue
        if not _has_time(task, wanted, place):
            return Outcome(task, "out of time", f"trained; {wanted.name} is still to be measured")
        if wanted.images not in loaded:
            loaded[wanted.images] = load_trained(
                folder, device=place.device, data_root=place.data_root, images=wanted.images
            )
        trained = loaded[wanted.images]
        measurements.save(folder, measurements.take(wanted.kind, trained, wanted.split, **dict(wanted.settings)))
    return Outcome(task, "done", summary(record))


def _begin_again_without_weights(task: Task, place: Place) -> None:
    """A record whose weights were removed would say that there is nothing to train."""
    folder = folder_of(place.out, task.config)
    if task.trains and not (folder / LAST_WEIGHTS).exists():
        (folder / RESULT).unlink(missing_ok=True)


def _has_time(task: Task, wanted: Measuring, place: Place) -> bool:
    """A measurement cannot be stopped half-way, so that one which would end too late is not begun."""
    return place.speeds.measuring(task.config, wanted) < place.seconds_left


def _line(task: Task, place: Place) -> Outcome:
    line = task.line
    assert line is not None
    start, end = (
        load_trained(folder_of(place.out, config), device=place.device, data_root=place.data_root, images=line.images)
        for config in (line.start, line.end)
    )
    taken = measurements.take_interpolation(start, end, line.alphas, line.split)
    measurements.save(start.run.path, taken)
    return Outcome(task, "done", f"{taken.name}, {taken.how['seconds']} s")
