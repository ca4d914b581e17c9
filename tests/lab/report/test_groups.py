"""Means, spreads and intervals against scipy and by hand."""

import pytest
from scipy import stats

from smoothout.lab.config import resolve
from smoothout.lab.report.groups import Difference, Group, Sample, baseline_of, difference
from smoothout.lab.report.sections import name_of


def test_samples():
    assert Sample((1.0, 2.0, 6.0)).mean == 3.0
    assert Sample((1.0, 2.0, 6.0)).sd == pytest.approx(7**0.5)
    assert Sample((1.0,)).sd is None


def test_intervals_are_students():
    a, b = [1.0, 2.0, 3.5, 2.2], [2.0, 2.5, 5.0, 3.0]
    paired = difference(a, b, paired=True)
    expected = stats.ttest_rel(b, a).confidence_interval(0.95)
    assert (paired.low, paired.high) == pytest.approx((expected.low, expected.high))
    welch = difference(a, b[:3], paired=False)
    expected = stats.ttest_ind(b[:3], a, equal_var=False).confidence_interval(0.95)
    assert (welch.low, welch.high) == pytest.approx((expected.low, expected.high))
    assert difference([1.0], [2.0], paired=True) is None


def test_a_difference_is_shown_only_with_three_runs_and_zero_outside():
    assert Difference(1.0, 0.1, 1.9, 3, True).is_shown
    assert not Difference(1.0, -0.1, 2.1, 5, True).is_shown
    assert not Difference(1.0, 0.9, 1.1, 2, True).is_shown
    assert Difference(-1.0, -1.9, -0.1, 3, False).is_shown
    infinite = difference([0.0, 0.0, 0.0], [1.0, 1.0, float("inf")], paired=True)
    assert infinite is not None
    assert not infinite.is_shown


def test_a_baseline_is_of_the_preset_or_of_one_that_trains_alike():
    def group(method, preset):
        return Group(resolve(model="c1", dataset="cifar10", method=method, preset=preset), ())

    noisy, paper, authors = group("smoothout", "ours"), group("plain", "paper"), group("plain", "authors")
    assert baseline_of(noisy, [authors, paper]) is paper
    own = group("plain", "ours")
    assert baseline_of(noisy, [paper, own]) is own
    assert baseline_of(noisy, [authors, noisy]) is None


def test_runs_of_two_learning_rates_have_their_own_baselines_and_names():
    groups = [Group(resolve(method=method, lr=lr), ()) for method in ("plain", "smoothout") for lr in (0.05, 0.1)]
    assert [baseline_of(group, groups) for group in groups] == [*groups[:2], *groups[:2]]
    assert [name_of(group, groups) for group in groups[:2]] == [
        "batch 128: Baseline, lr 0.05",
        "batch 128: Baseline, lr 0.1",
    ]
    assert name_of(groups[0], [groups[0], groups[2]]) == "batch 128: Baseline"
