"""Runs that take turns: what each is told of the time."""

import time

from smoothout.lab.train.turns import Clock


def test_time_is_shared_among_the_runs_that_are_at_work(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = Clock()
    with clock.at_work():
        started = clock()
        with clock.at_work():
            now += 10.0
            assert clock() - started == 5.0
        now += 10.0  # the other one is done
        assert clock() - started == 15.0
