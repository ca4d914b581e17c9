"""Whether shorter runs rank alike: the verdict follows the records."""

import random
from dataclasses import replace
from itertools import permutations

import pytest
from scipy import stats

from smoothout.lab.experiments import lengths
from smoothout.lab.experiments.choice import DEEP_EPOCHS
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import Setting

OURS = Setting("paper", "ours")


def records(as_if_run, short, long):
    """Gains over a baseline of 0.8, of all candidates."""
    runs = []
    for epochs, gains in ((lengths.SHORT, short), (DEEP_EPOCHS, long)):
        rows = lengths._candidates(OURS, epochs)
        (baseline,) = {row.versus for row in rows}
        runs.append(as_if_run(baseline, 0.8))
        assert {row.config.epochs for row in rows} == {epochs}
        runs += [as_if_run(row.config, 0.8 + gain) for row, gain in zip(rows, gains)]
    return Records(runs)


def verdict(as_if_run, short, long):
    return lengths.lengths(OURS).judge(records(as_if_run, short, long))[0]


def test_the_verdict_is_that_of_the_records(as_if_run):
    gains = [0.001 * (5 * i % 6) for i in range(6)]
    alike = verdict(as_if_run, gains, [2 * gain for gain in gains])
    assert alike.verdict == "holds"
    assert "τ +1.00" in alike.evidence
    assert "+0.50 and +1.00" in alike.evidence
    assert "over 6 of 6 candidates; the best of 100 epochs is number 1 at 400" in alike.evidence
    assert verdict(as_if_run, gains, [-gain for gain in gains]).verdict == "the opposite order"
    swapped = [sorted(gains)[i] for i in (1, 0, 3, 2, 5, 4)]
    mixed = verdict(as_if_run, sorted(gains), swapped)
    assert mixed.verdict == "no order in common is shown"
    assert "number 2 at 400" in mixed.evidence
    assert "over 5 of 6 candidates" in verdict(as_if_run, gains[:5], gains[:5]).evidence
    assert verdict(as_if_run, gains[:4], gains[:4]).verdict == "not measured yet"


def test_a_candidate_that_diverges_in_the_long_run_is_its_last(as_if_run):
    gains = [0.001 * i for i in range(6)]
    made = records(as_if_run, gains, gains).all()
    best = lengths._candidates(OURS, DEEP_EPOCHS)[-1].config
    runs = [
        replace(found, run=replace(found.run, record=None, failure="nan")) if found.run.config == best else found
        for found in made
    ]
    verdict, *_ = lengths.lengths(OURS).judge(Records(runs))
    assert "over 6 of 6 candidates; the best of 100 epochs is number 6 at 400" in verdict.evidence
    assert "+0.50 and diverged" in verdict.evidence


def test_orders_are_compared_within_strata():
    generator = random.Random(0)
    first = [generator.random() for _ in range(30)]
    second = [x + generator.random() for x in first]
    expected = stats.kendalltau(first, second, method="exact")
    tau, p = lengths.kendall(first, second, ["one"] * 30)
    assert tau == pytest.approx(expected.statistic)
    assert p == pytest.approx(expected.pvalue, rel=0.1)
    # Two regimes that lie apart in both figures: only what is ordered within them counts.
    low, high = [1.0, 2.0, 3.0, 4.0], [11.0, 12.0, 13.0, 14.0]
    tau, p = lengths.kendall([*low, *high], [*low[::-1], *high[::-1]], ["low"] * 4 + ["high"] * 4)
    assert tau == -1.0
    assert lengths.kendall([*low, *high], [*low[::-1], *high[::-1]], [None] * 8)[0] > 0
    orders = list(permutations(range(4)))  # that both are the other way round, or both the same
    taus = [lengths.kendall(range(4), order, [0] * 4)[0] for order in orders]
    scores = [one + other for one in taus for other in taus]
    assert p == pytest.approx(sum(abs(score) == 2 for score in scores) / len(scores), abs=0.01)
    assert lengths.kendall([1.0, 1.0], [1.0, 2.0], [0, 0]) == (0.0, 1.0)
    assert lengths.kendall([1.0, 2.0], [1.0, 2.0], ["low", "high"]) == (0.0, 1.0)  # nothing to compare
    assert lengths._in_common(range(5), [0, 1, 2, 4, 3]) == ("no order in common is shown", "τ +0.80 (p = 0.086)")


def by_epoch(found, early, late, last):
    """With these accuracies: up to epoch 200, up to the last but one, and in the last."""
    (epoch, *_) = found.run.metrics
    whole = 200 * [early] + 199 * [late] + [last]
    accuracies = whole[: found.run.config.epochs_trained]
    metrics = [replace(epoch, epoch=i + 1, test_accuracy=accuracy) for i, accuracy in enumerate(accuracies)]
    return replace(found, run=replace(found.run, metrics=tuple(metrics)))


def decided(runs):
    """The verdicts on the first epochs, of held-out images and of the test set."""
    return lengths.lengths(OURS).judge(Records(runs))[-2:]


def test_when_the_order_is_decided_is_read_from_whole_runs(as_if_run):
    rows = lengths._candidates(OURS, DEEP_EPOCHS)
    configs = [rows[0].versus, *(row.config for row in rows)]

    def runs(changes, **settings):
        made = [as_if_run(replace(config, **settings), 0.9) for config in configs]
        return [
            by_epoch(each, 0.8 + 0.01 * i, 0.8 + 0.01 * i + change, 0.5 - 0.01 * i)
            for i, (each, change) in enumerate(zip(made, changes))
        ]

    on_held_out, on_test = decided(runs([0.002] * 7))
    assert on_held_out.verdict == "holds"
    assert "τ +1.00" in on_held_out.evidence
    assert "over 7 runs, with the last epoch by itself τ -1.00" in on_held_out.evidence
    assert "accuracy then changes by +0.20 ± 0.00 points" in on_held_out.evidence
    assert on_test.verdict == "not measured yet"
    assert (on_held_out.claim[-15:], on_test.claim[-11:]) == ("held-out images", "test images")
    assert decided(runs([0.002] * 7, hold_out=0))[1].verdict == "holds"
    turned, _ = decided(runs([-0.02 * i for i in range(7)]))
    assert turned.verdict == "the opposite order"
    plain_twice = [*runs([0.001, *[0.003] * 6]), *runs([0.001, *[0.003] * 6])[:1]]
    plain_twice[-1] = replace(plain_twice[-1], run=replace(plain_twice[-1].run, config=configs[0].with_seed(1)))
    assert "by +0.20 points [+0.20, +0.20] (n = 2) more with noise than without" in decided(plain_twice)[0].evidence


@pytest.mark.parametrize("settings", [{"strength_schedule": "linear"}, {"stop_after": 200}, {"batch_size": 128}])
def test_a_run_of_another_kind_does_not_say_when_the_order_is_decided(as_if_run, settings):
    configs = [replace(row.config, **settings) for row in lengths._candidates(OURS, DEEP_EPOCHS)]
    runs = [by_epoch(as_if_run(config, 0.9), 0.8, 0.9, 0.9) for config in configs]
    assert {verdict.verdict for verdict in decided(runs)} == {"not measured yet"}
