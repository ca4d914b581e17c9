"""Verdicts on the text's claims, from accuracies that are made up."""

from dataclasses import replace

import pytest

from smoothout.lab.experiments import claims
from smoothout.lab.experiments.choice import held_out
from smoothout.lab.experiments.networks import C1, configure
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import Setting

PAPER = Setting("paper", "paper")


def runs(as_if_run, config, mean, n=3):
    return [as_if_run(config.with_seed(seed), mean + 1e-3 * (seed % 3)) for seed in range(n)]


def lost(found):
    return replace(found, run=replace(found.run, record=None, failure="the loss is nan"))


def verdict(about, made):
    (found,) = (v for v in claims.claims(PAPER).judge(Records(made)) if about in v.claim)
    return found


@pytest.mark.parametrize(
    ("about", "word"),
    [
        ("gains more", "holds"),
        ("reaches", "holds: it is above"),
        ("standard deviations", "4 of 4 of the paper's lie in our 95 % intervals"),
        ("SWA", "gains over the baseline"),
    ],
)
def test_nothing_is_claimed_of_configurations_of_which_a_run_diverged(as_if_run, about, word):
    means = {(256, "plain"): 0.74, (256, "smoothout"): 0.75, (5000, "plain"): 0.70, (5000, "smoothout"): 0.76}
    made = []
    for (size, method), mean in {**means, (5000, "swa"): 0.75}.items():
        made += runs(as_if_run, configure(PAPER, C1, size, method), mean, n=4)
    assert verdict(about, made).verdict == word
    fourth = [each for each in made if each.run.config.seed == 3 and each.run.config.method != "plain"]
    rest = [each for each in made if each not in fourth]
    assert verdict(about, [*rest, *map(lost, fourth)]).verdict.endswith("runs diverged")


def test_a_strength_is_robust_if_that_of_the_small_batch_gains_at_the_large_one(as_if_run):
    ours = replace(PAPER, preset="ours")
    made = []
    for size, gains in ((C1.small, (0.0, 0.01, 0.03, 0.02, -0.01)), (C1.large, (0.0, 0.0, 0.02, 0.04, -0.02))):
        made += runs(as_if_run, held_out(ours, C1, size, "plain"), 0.7)
        for config, gain in zip(claims._strengths(ours, size), gains):
            made += runs(as_if_run, config, 0.7 + gain)
    found = verdict("robust", made)
    assert found.verdict == "holds"
    assert "chosen at 256: a = 0.0375; at 5000 it changes held-out accuracy by +2.00 points" in found.evidence
    assert "a gain is measured there at a × 1, 2 (of × 0.25, 0.5, 1, 2, 4)" in found.evidence
    assert verdict("robust", [*made[:-1], lost(made[-1])]).verdict == "1 runs diverged"


def test_the_gap_between_small_and_large_batch_with_and_without_dropout(as_if_run):
    made = runs(as_if_run, configure(PAPER, C1, C1.small, "plain"), 0.75)
    made += runs(as_if_run, configure(PAPER, C1, C1.large, "plain"), 0.72)
    *without, dropped = (row.config for row in claims._dropout(PAPER))
    for config, mean in zip(without, (0.71, 0.70)):
        made += runs(as_if_run, config, mean)
    found = verdict("dropout", made)
    assert found.verdict == "holds"
    assert "gap with dropout: +3.00 points" in found.evidence
    assert "gap without: +1.00 points" in found.evidence
    assert "Bernoulli" not in found.evidence
    noisy = runs(as_if_run, dropped, 0.71)
    assert "Bernoulli noise at 5000 changes accuracy by -1.00 points" in verdict("dropout", made + noisy).evidence


@pytest.mark.parametrize(
    ("mean", "n", "word"),
    [(0.75, 3, "gains over the baseline"), (0.70, 3, "no gain measured"), (0.75, 2, "no gain measured"),
     (0.65, 3, "no gain measured")],
)  # fmt: skip
def test_an_average_gains_only_where_that_is_shown(as_if_run, mean, n, word):
    made = runs(as_if_run, configure(PAPER, C1, C1.large, "plain"), 0.7)
    made += runs(as_if_run, configure(PAPER, C1, C1.large, "swa"), mean, n)
    assert verdict("SWA", made).verdict == word


@pytest.mark.parametrize(("mean", "word"), [(0.70, "holds"), (0.75, "no difference measured"), (0.9, "does not hold")])
def test_the_large_batch_reaches_the_small_one_only_where_that_is_shown(as_if_run, mean, word):
    made = runs(as_if_run, configure(PAPER, C1, C1.small, "plain"), mean)
    made += runs(as_if_run, configure(PAPER, C1, C1.large, "smoothout"), 0.75)
    assert verdict("reaches", made).verdict.startswith(word)
    assert verdict("reaches", made[:-1]).verdict == "too few runs"


def test_gains_of_a_side_without_a_seed_in_common_are_not_compared(as_if_run):
    made = []
    for size in (C1.small, C1.large):
        made += runs(as_if_run, configure(PAPER, C1, size, "plain"), 0.7)
        smooth = configure(PAPER, C1, size, "smoothout")
        made += [as_if_run(smooth.with_seed(seed + (9 if size == C1.large else 0)), 0.75) for seed in range(3)]
    assert verdict("gains more", made).verdict == "not measured yet"
