"""The strength over training, by name: schedules that count in steps get the number of steps there will be."""

from __future__ import annotations

from collections.abc import Callable

from smoothout import schedule
from smoothout.schedule import Schedule

SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "constant": lambda steps: schedule.Constant(),
    "linear": lambda steps: schedule.Linear(steps),
    "cosine": lambda steps: schedule.Cosine(steps),
    "tanh": lambda steps: schedule.Tanh(steps),
    "tanh-falling": lambda steps: schedule.Tanh(steps, rising=False),
    "anneal": lambda steps: schedule.Anneal(),
}


def strength_schedule(name: str, steps: int, warmup_steps: int = 0) -> Schedule:
    """The schedule of that name over `steps` updates, times a rise from 0 in the first `warmup_steps`."""
    over_training = SCHEDULES[name](max(steps, 1))
    return schedule.Warmup(warmup_steps, then=over_training) if warmup_steps else over_training
