"""Several runs in one process, a step of each in turn: one small network leaves most of a GPU idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
Run = Generator[None, None, T]


class Clock:
    """Seconds of runs that share a device: time is divided among those that are at work then."""

    def __init__(self) -> None:
        self._at_work, self._seconds, self._read = 0, 0.0, time.monotonic()

    def __call__(self) -> float:
        now = time.monotonic()
        self._seconds += (now - self._read) / max(1, self._at_work)
        self._read = now
        return self._seconds

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside, there is one run more."""
        self()
        self._at_work += 1
        try:
            yield
        finally:
            self()
            self._at_work -= 1


class Turn:
    """A stream of a CUDA device and a random stream of its own, so that a run is what it is alone.

    Generators swap their state by reference: a captured graph keeps the one that it was captured with.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._stream = torch.cuda.Stream(device)
        self._default = torch.cuda.default_generators[index]
        self._random = self._default.clone_state()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self._random)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._default.graphsafe_set_state(before)


def alone(run: Run[T]) -> T:
    """A run from beginning to end."""
    while True:
        try:
            next(run)
        except StopIteration as end:
            return end.value


def in_turns(
    makers: Sequence[Callable[[], Run[T]]], device: torch.device, expected: tuple[type[Exception], ...]
) -> list[T | Exception]:
    """All runs to their ends, each by itself: what one gives, or the exception (of an expected kind) that ended it."""
    turns = [Turn(device) for _ in makers]
    torch.cuda.synchronize(device)
    runs: dict[int, Run[T]] = {}
    results: dict[int, T | Exception] = {}
    for number, make in enumerate(makers):
        runs[number] = make()
    while runs:
        for number, run in list(runs.items()):
            try:
                with turns[number]():
                    next(run)
                continue
            except StopIteration as end:
                results[number] = end.value
            except expected as error:
                results[number] = error
            del runs[number]
    torch.cuda.synchronize(device)
    return [results[number] for number in range(len(makers))]
