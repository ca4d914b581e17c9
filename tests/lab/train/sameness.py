"""Comparing runs bit for bit."""

from dataclasses import replace

import torch

from smoothout.lab.runs import load_run


def assert_same_run(one, other):
    """Metrics (but for wall time) and both sets of weights are equal to the last bit."""
    one, other = load_run(one), load_run(other)
    assert without_times(one.metrics) == without_times(other.metrics)
    for which in ("last", "best"):
        left, right = one.weights(which), other.weights(which)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left), which
    assert replace(one.record.best, seconds=0) == replace(other.record.best, seconds=0)
    assert one.record.as_trained == other.record.as_trained


def without_times(metrics):
    return [replace(epoch, seconds=0) for epoch in metrics]
