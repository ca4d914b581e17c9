"""The strength over training: functions step → factor, without state, so that a resumed run needs only its step.

Any callable from an int to a finite, non-negative float is a schedule. Those here are values: they compare and print.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

from smoothout.checks import is_whole

Schedule = Callable[[int], float]


def _progress(step: int, steps: int) -> float:
    return min(max(step / steps, 0.0), 1.0)


@dataclass(frozen=True)
class _OverSteps:
    """A schedule that is over after `steps` steps and then stays at its last value."""

    steps: int

    def __post_init__(self) -> None:
        if not is_whole(self.steps) or self.steps < 1:
            raise ValueError(f"{type(self).__name__}(steps={self.steps!r}): steps is a whole number of at least 1")
        object.__setattr__(self, "steps", operator.index(self.steps))  # NumPy's becomes Python's


@dataclass(frozen=True)
class Constant:
    """Always 1."""

    def __call__(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Linear(_OverSteps):
    """From `start` to `end` in a straight line."""

    start: float = 0.0
    end: float = 1.0

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * _progress(step, self.steps)


@dataclass(frozen=True)
class Cosine(_OverSteps):
    """From `start` to `end` along half a cosine: flat at both ends."""

    start: float = 0.0
    end: float = 1.0

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * (1.0 - math.cos(math.pi * _progress(step, self.steps))) / 2.0


@dataclass(frozen=True)
class Tanh(_OverSteps):
    """(tanh(10·(t/T − ½)) + 1)/2, from 0 to 1; with `rising=False` from 1 to 0, as the authors' Table 1 runs had it."""

    rising: bool = True

    def __call__(self, step: int) -> float:
        rise = (math.tanh(10.0 * (_progress(step, self.steps) - 0.5)) + 1.0) / 2.0
        return rise if self.rising else 1.0 - rise


@dataclass(frozen=True)
class Anneal:
    """√(1/(1 + t)^γ): the authors' anneal, after gradient-noise annealing; it never ends."""

    gamma: float = 0.55

    def __call__(self, step: int) -> float:
        return math.sqrt(1.0 / (1.0 + step) ** self.gamma)


@dataclass(frozen=True)
class Warmup(_OverSteps):
    """From 0 to 1 in `steps` steps, times the schedule `then`, which counts from the beginning."""

    then: Schedule = Constant()

    def __call__(self, step: int) -> float:
        return _progress(step, self.steps) * self.then(step)


def check_schedule(schedule: object) -> None:
    """Refuse what is no function of a step: a name, a number, or a class in place of an object of it."""
    if not callable(schedule):
        raise TypeError(
            f"schedule={schedule!r} is not callable: give a function from a step to a factor, "
            "such as smoothout.schedule.Linear(1000)"
        )
    if isinstance(schedule, type) and any("__call__" in vars(base) for base in schedule.__mro__):
        raise TypeError(f"schedule is the class {schedule.__name__}: give an object of it, {schedule.__name__}(…)")


def factor(schedule: Schedule | None, step: int) -> float:
    """The schedule's value at a step, checked."""
    given = 1.0 if schedule is None else schedule(step)
    try:
        value = float(given)
    except (TypeError, ValueError):
        raise TypeError(f"schedule {schedule!r} gave {given!r} at step {step}: a factor is a number") from None
    if not math.isfinite(value) or value < 0.0:
        raise ValueError(f"schedule {schedule!r} gave {value} at step {step}: a factor is finite and not negative")
    return value
