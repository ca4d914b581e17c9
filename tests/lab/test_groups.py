"""Means, spreads and intervals against scipy and by hand."""

from dataclasses import replace

import pytest
from scipy import stats

from in_process import smoothout
from smoothout.lab.config import resolve
from smoothout.lab.groups import (
    Difference,
    Group,
    Sample,
    baseline_of,
    compare_in_study,
    contrast,
    difference,
    group_runs,
    pooled,
)
from smoothout.lab.report.names import name_of
from smoothout.lab.report.sections import _difference, all_sections, last_accuracy
from smoothout.lab.runs import load_run
from smoothout.lab.train.start import Options, train


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


def test_a_spread_in_common_is_that_of_students_test_and_of_more_samples():
    a, b, c = Sample((1.0, 2.0, 3.5, 2.2)), Sample((2.0, 2.5, 5.0)), Sample((7.0,))
    of_two = contrast([b], [a], pooled((a, b, c)))
    expected = stats.ttest_ind(b.values, a.values, equal_var=True).confidence_interval(0.95)
    assert (of_two.low, of_two.high) == pytest.approx((expected.low, expected.high))
    both = pooled(map(Sample, ((1.0, 3.0), (10.0, 14.0))))
    assert (both.sd, both.freedom) == (pytest.approx(5**0.5), 2)  # variances 2 and 8
    assert pooled([c]) is None
    assert contrast([a], [c]) is None


def test_a_difference_of_differences():
    w, x, y, z = (Sample(values) for values in ((1.0, 2.0), (4.0, 8.0, 9.0), (3.0, 3.5), (1.0, 1.2, 1.4)))
    found = contrast([w, x], [y, z])
    assert found.mean == pytest.approx(1.5 + 7.0 - 3.25 - 1.2)
    variances = [sample.sd**2 / sample.n for sample in (w, x, y, z)]
    freedom = sum(variances) ** 2 / sum(v**2 / (s.n - 1) for v, s in zip(variances, (w, x, y, z)))
    assert found.high - found.mean == pytest.approx(stats.t.ppf(0.975, freedom) * sum(variances) ** 0.5)
    assert found.n == 2
    pooled_sd = pooled((w, x, y, z))
    wide = contrast([w, x], [y, z], pooled_sd)
    error = pooled_sd.sd * (1 / 2 + 1 / 3 + 1 / 2 + 1 / 3) ** 0.5
    assert wide.high - wide.mean == pytest.approx(stats.t.ppf(0.975, 6) * error)


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


def test_runs_whose_statistics_were_measured_anew_have_a_baseline_of_their_own():
    hows = ("clean", "no")
    groups = [Group(resolve(method=m, remeasure_bn=how), ()) for m in ("plain", "smoothout") for how in hows]
    assert [baseline_of(group, groups) for group in groups] == [*groups[:2], *groups[:2]]
    assert baseline_of(groups[3], groups[:1]) is None


def test_runs_of_two_learning_rates_have_their_own_baselines_and_names():
    groups = [Group(resolve(method=method, lr=lr), ()) for method in ("plain", "smoothout") for lr in (0.05, 0.1)]
    assert [baseline_of(group, groups) for group in groups] == [*groups[:2], *groups[:2]]
    assert [name_of(group, groups) for group in groups[:2]] == [
        "batch 128: Baseline, lr 0.05",
        "batch 128: Baseline, lr 0.1",
    ]
    assert name_of(groups[0], [groups[0], groups[2]]) == "batch 128: Baseline"


def test_a_run_that_stopped_early_says_so_beside_others():
    groups = [Group(resolve(method="plain", epochs=4, stop_after=stop), ()) for stop in (0, 2)]
    assert [name_of(group, groups) for group in groups] == [
        "batch 128: Baseline, 4 epochs",
        "batch 128: Baseline, 2 of 4 epochs",
    ]
    assert baseline_of(groups[1], groups) == groups[1]


def test_a_baseline_that_trains_otherwise_is_none():
    noisy, plain = (Group(resolve(method=method, lr=lr), ()) for method, lr in (("smoothout", 0.1), ("plain", 0.05)))
    assert baseline_of(noisy, [plain, noisy]) is None


@pytest.mark.parametrize("settings", [{"log_smoothed_loss": True}, {"channels_last": True}, {"compile": True}])
def test_a_baseline_may_differ_in_what_changes_nothing_that_is_learnt(settings):
    noisy, plain = Group(resolve(method="smoothout", **settings), ()), Group(resolve(method="plain"), ())
    assert baseline_of(noisy, [plain, noisy]) is plain


def test_an_interval_is_by_the_spread_of_all_groups_that_train_as_long_on_either_side(tmp_path):
    run = _a_run(tmp_path)

    def group(epochs, *accuracies, lr=0.1):
        config = resolve(model="mlp", method="plain", epochs=epochs, lr=lr)
        last = (replace(run.record.last, test_accuracy=value) for value in accuracies)
        records = (replace(run.record, config=config.with_seed(i), last=each) for i, each in enumerate(last))
        return Group(config, tuple(replace(run, config=record.config, record=record) for record in records))

    short, long = group(1, 0.1, 0.2, 0.3), group(2, 0.5, 0.7, 0.6)
    study = [short, long, group(2, 0.2, 0.8, lr=0.2), group(3, 0.0, 1.0)]
    found = compare_in_study([long], [short], last_accuracy, study)
    expected = contrast([long.sample(last_accuracy)], [short.sample(last_accuracy)],
                        pooled(each.sample(last_accuracy) for each in study[:3]))  # fmt: skip
    assert (found.mean, found.low, found.high) == (expected.mean, expected.low, expected.high)


def test_a_seed_counts_once_by_its_first_training(tmp_path):
    config = resolve(model="mlp", epochs=1, batch_size=400)
    for name in ("first", "second"):
        train(config, tmp_path / name, Options(device="cpu", quiet=True))
    first, second = (load_run(tmp_path / name) for name in ("first", "second"))
    later = replace(second.record, provenance=replace(second.record.provenance, started="2999-01-01T00:00:00+00:00"))
    (group,) = group_runs([replace(second, record=later), first, first])
    assert group.runs == (first,)


def test_what_was_judged_on_held_out_images_or_measured_otherwise_is_told_apart(tmp_path):
    usual = ("--model", "mlp", "--epochs", "1", "--batch-size", "400", "--device", "cpu")
    for name, more in (
        ("plain", ("--method", "plain")),
        ("noisy", ("--method", "smoothout")),
        ("held", ("--method", "plain", "--hold-out", "200")),
    ):
        done = smoothout("train", *usual, *more, "--out", name, cwd=tmp_path)
        assert ("held-out accuracy" if name == "held" else "test accuracy") in done.stdout
    held = smoothout("report", "held", "--markdown", cwd=tmp_path).stdout
    assert "held-out accuracy, last epoch" in held
    assert "test" not in held
    both = smoothout("report", "held", "plain", "--markdown", cwd=tmp_path).stdout
    assert "Baseline, on held-out images" in both
    for strengths, names in (("0,0.1", ("plain", "noisy")), ("0,0.2", ("noisy",))):
        for name in names:
            how = ("--strengths", strengths, "--draws", "2", "--device", "cpu")
            assert smoothout("measure", "sensitivity", name, *how, cwd=tmp_path).returncode == 0
        text = smoothout("report", "plain", "noisy", "--markdown", cwd=tmp_path).stdout
        assert ("loss rise" in text) == (strengths == "0,0.1")
    twice = smoothout("report", "plain", "./plain", "noisy", "--markdown", cwd=tmp_path)
    assert "| 1 |" in twice.stdout
    assert "| 2 |" not in twice.stdout


def test_the_rise_is_from_no_noise_to_the_strongest_whatever_the_order(tmp_path):
    usual = ("--model", "mlp", "--epochs", "1", "--batch-size", "400", "--device", "cpu")
    smoothout("train", *usual, "--method", "plain", "--out", "run", cwd=tmp_path)

    def told(strengths):
        how = ("--strengths", strengths, "--draws", "2", "--device", "cpu")
        smoothout("measure", "sensitivity", "run", *how, cwd=tmp_path)
        return smoothout("report", "run", "--markdown", cwd=tmp_path).stdout

    sorted_, mixed = told("0,0.05,0.2"), told("0.05,0.2,0")
    assert "noise of strength 0.2" in sorted_
    assert sorted_ == mixed
    assert told("0.05,0.2") == sorted_  # 0 is added


def test_runs_that_diverged_are_counted_and_nothing_is_better_without_them(tmp_path):
    run = _a_run(tmp_path)
    lost = replace(run, config=run.config.with_seed(9), record=None, failure="the loss is nan")
    other = replace(lost, config=replace(lost.config, lr=9.0))
    (alone,) = group_runs([run, replace(run, record=None, failure="the loss is nan")])
    assert alone.diverged == 0  # it was tried again, and ended
    group, none = group_runs([run, lost, other])
    assert (len(group.runs), group.diverged, len(none.runs), none.diverged) == (1, 1, 0, 1)
    section, *_ = all_sections([group, none])
    assert section.table.rows[0].cells[1].text == "1, 1 more diverged"
    assert section.paragraphs[-1].endswith("lr 9.0: all 1 runs diverged.")
    better, worse = Difference(1.0, 0.5, 1.5, 5, True), Difference(-1.0, -1.5, -0.5, 5, True)
    told = [[_difference(d, g, points=True).tone for d in (better, worse)] for g in (replace(group, diverged=0), group)]
    assert told == [["good", "bad"], ["faint", "bad"]]


def test_runs_of_several_processes_are_no_seeds_of_runs_of_one(tmp_path):
    run = _a_run(tmp_path)
    two = replace(run.record, provenance=replace(run.record.provenance, processes=2))
    groups = group_runs([run, replace(run, record=two)])
    assert [name_of(group, groups) for group in groups] == [
        "batch 400: Baseline, 1 processes",
        "batch 400: Baseline, 2 processes",
    ]
    assert [baseline_of(group, groups) for group in groups] == groups


def _a_run(tmp_path):
    train(resolve(model="mlp", method="plain", epochs=1, batch_size=400), tmp_path, Options(device="cpu", quiet=True))
    return load_run(tmp_path)
