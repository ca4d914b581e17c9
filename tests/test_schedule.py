import math

import numpy as np
import pytest

from smoothout import schedule


def test_values():
    assert schedule.Constant()(7) == 1.0
    assert [schedule.Linear(4)(t) for t in (0, 1, 4, 9)] == [0.0, 0.25, 1.0, 1.0]
    assert [schedule.Linear(4, start=1.0, end=0.5)(t) for t in (0, 2, 4)] == [1.0, 0.75, 0.5]
    assert [schedule.Cosine(4)(t) for t in (0, 2, 4)] == pytest.approx([0.0, 0.5, 1.0])
    assert [schedule.Cosine(4, start=1.0, end=0.5)(t) for t in (0, 2, 4)] == pytest.approx([1.0, 0.75, 0.5])
    assert [schedule.Linear(1)(t) for t in (0, 1)] == [0.0, 1.0]
    assert schedule.Tanh(100)(50) == 0.5
    assert schedule.Tanh(100)(75) == (math.tanh(2.5) + 1) / 2
    assert schedule.Tanh(100, rising=False)(100) == pytest.approx(4.5398e-05, rel=1e-4)
    assert schedule.Tanh(100, rising=False)(0) == pytest.approx(1 - 4.5398e-05)
    assert schedule.Anneal()(0) == 1.0
    assert schedule.Anneal()(9) == pytest.approx(math.sqrt(1 / 10**0.55))
    assert [schedule.Warmup(2)(t) for t in (0, 1, 2, 3)] == [0.0, 0.5, 1.0, 1.0]
    assert schedule.Warmup(2, schedule.Linear(4, 1.0, 0.0))(1) == 0.5 * 0.75


def test_any_callable_is_a_schedule_and_bad_values_are_named():
    assert schedule.factor(lambda step: step / 2, 3) == 1.5
    assert schedule.factor(None, 3) == 1.0
    schedule.check_schedule(float)  # a class, but calling it gives a number
    for bad in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"gave {bad} at step 3"):
            schedule.factor(lambda step, bad=bad: bad, 3)


def test_schedules_are_values():
    assert schedule.Tanh(10) == schedule.Tanh(10)
    assert repr(schedule.Linear(5)) == "Linear(steps=5, start=0.0, end=1.0)"
    for bad in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="whole number of at least 1"):
            schedule.Cosine(bad)


def test_steps_of_numpy():
    assert repr(schedule.Tanh(np.int64(5))) == "Tanh(steps=5, rising=True)"
