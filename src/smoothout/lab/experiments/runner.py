"""The queue, one task after another or by several worker processes, until it is empty or the time is up."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait

from smoothout.lab.config import Config
from smoothout.lab.experiments.queue import Task
from smoothout.lab.experiments.worker import Outcome, Place, carry_out, carry_out_together
from smoothout.lab.presets import TABLE_1_MODELS
from smoothout.lab.train.processes import choose_device
from smoothout.lab.train.start import SMALL_NETWORKS_TOGETHER

WHOLE_STEPS = ("plain", "smoothout", "adasmoothout")  # methods whose updates are one CUDA graph, so equally quick
Say = Callable[[str], None]


def run_queue(tasks: Sequence[Task], place: Place, jobs: int = 1, say: Say = print) -> list[Outcome]:
    """Carry tasks out, in order; gives what was tried. With a deadline it stops at a checkpoint; call again to go on.

    Args:
        jobs: worker processes, each of which is started once. On one GPU they take turns: several help where the host
            is what a run waits for.
        say: told one line a task.
    """
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        with _signals(signal.default_int_handler, signal.SIGTERM):  # as Ctrl-C, which is an outcome
            return _one_after_another(tasks, place, say)
    with _Workers(jobs, place) as workers, _signals(workers.stop, signal.SIGINT, signal.SIGTERM):
        return workers.run(tasks, say)


@contextmanager
def _signals(handler: Callable[..., object], *numbers: int) -> Iterator[None]:
    """Handled so inside, where there are signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _one_after_another(tasks: Sequence[Task], place: Place, say: Say) -> list[Outcome]:
    outcomes: list[Outcome] = []
    waiting = list(tasks)
    while waiting:
        task = _next_ready(waiting, outcomes, tasks)
        group = [task, *_companions(task, waiting, place)]
        for outcome in carry_out_together(group, place) if len(group) > 1 else [carry_out(task, place)]:
            outcomes.append(outcome)
            say(_in_words(outcome, len(outcomes), len(tasks)))
        if any(outcome.stops_the_queue for outcome in outcomes):
            break
    return outcomes


def _companions(task: Task, waiting: list[Task], place: Place) -> list[Task]:
    """Runs that go with a task, taken off the list: on a GPU those of small networks train side by side."""
    if choose_device(place.device).type != "cuda" or not task.trains:
        return []
    fitting = companions(task.config, [t.config for t in waiting if t.trains], place.together)
    found = [t for t in waiting if t.trains and t.config in fitting]
    waiting[:] = [t for t in waiting if t not in found]
    return found


def companions(config: Config, waiting: Sequence[Config], together: int | None = None) -> list[Config]:
    """Which of those that wait train beside this run: its other seeds, then runs that take as long on the same data.

    Args:
        together: how many at most, this one included; None: five of a small network, one of any other.
    """

    def kind(config: Config) -> tuple[object, ...]:
        steps_itself = config.method if config.method not in WHOLE_STEPS else ""
        data = config.dataset, config.hold_out, config.batch_size, config.epochs_trained
        return config.model, *data, config.draws, config.denoise, steps_itself

    if together is None:
        together = SMALL_NETWORKS_TOGETHER if config.model in TABLE_1_MODELS else 1
    same = [other for other in waiting if kind(other) == kind(config)]
    same.sort(key=lambda other: other.with_seed(0) != config.with_seed(0))
    return same[: together - 1]


def _next_ready(waiting: list[Task], outcomes: Sequence[Outcome], tasks: Sequence[Task]) -> Task:
    """The first task that waits for nothing, taken off the list; IndexError if all wait."""
    ended = {outcome.task.config for outcome in outcomes if outcome.task.line is None}
    runs = {task.config for task in tasks if task.line is None}
    for i, task in enumerate(waiting):
        ends = (task.line.start, task.line.end) if task.line else ()
        if all(end not in runs or end in ended for end in ends):
            return waiting.pop(i)
    raise IndexError("every task waits for another")


class _Workers:
    """Processes that live as long as the queue and take one task at a time."""

    def __init__(self, count: int, place: Place) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._stopped = False
        self._processes = []
        self._connections: list[Connection] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, replace(place, threads=place.threads or 1)))
            process.start()
            theirs.close()  # so that a worker's end is noticed here, and ours there
            self._processes.append(process)
            self._connections.append(ours)

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *error: object) -> None:
        for connection in self._connections:
            connection.close()  # a worker that reads the end goes home
        for process in self._processes:
            process.join()

    def stop(self, *_: object) -> None:
        """Begin nothing more, and let every worker stop at a checkpoint: they hear of signals from here alone."""
        self._stopped = True
        for process in self._processes:
            process.terminate()

    def run(self, tasks: Sequence[Task], say: Say) -> list[Outcome]:
        waiting, outcomes = list(tasks), []
        busy: dict[Connection, Task] = {}
        idle = list(self._connections)
        while busy or (waiting and not self._stopped and idle):
            while idle and waiting and not self._stopped:
                try:
                    task = _next_ready(waiting, outcomes, tasks)
                except IndexError:
                    break  # lines wait for runs that others are at
                connection = idle.pop()
                busy[connection] = task
                with suppress(OSError):  # of a worker that is gone, which what it answers says
                    connection.send(task)
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                outcome, is_alive = _received(ready, busy.pop(ready))
                idle += [ready] if is_alive else []
                outcomes.append(outcome)
                self._stopped = self._stopped or outcome.stops_the_queue
                say(_in_words(outcome, len(outcomes), len(tasks)))
        return outcomes


def _received(connection: Connection, task: Task) -> tuple[Outcome, bool]:
    """A worker's answer, and whether the worker is still there."""
    try:
        return connection.recv(), True
    except (EOFError, OSError):  # the latter of one that ended before it had read the task
        return Outcome(task, "failed", "its process ended without a word (killed, or out of memory)"), False


def _work(connection: Connection, place: Place) -> None:
    """A worker's life: tasks until the other side closes."""
    os.setsid()  # a terminal's Ctrl-C goes to the parent, which passes it on once
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    while True:
        try:
            task = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        with suppress(OSError):  # nobody waits for it any more
            connection.send(carry_out(task, place))


def _in_words(outcome: Outcome, number: int, total: int) -> str:
    return f"{number}/{total} {outcome.task}: {outcome.state}, {outcome.message}"
