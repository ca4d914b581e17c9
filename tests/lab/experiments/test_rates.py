"""Learning rates of C1: each side has its best, and the verdict is of those two."""

from dataclasses import replace
from pathlib import Path

import pytest

from smoothout.lab.experiments import rates
from smoothout.lab.experiments.choice import held_out
from smoothout.lab.experiments.chosen import CHOSEN
from smoothout.lab.experiments.networks import C1, configure
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import NOT_MEASURED, Setting

RESULTS = Path(__file__).parents[3] / "results"
OURS = Setting("paper", "ours")
PLAIN, SMOOTH = (0.70, 0.72, 0.73, 0.75, 0.74, 0.71), (0.71, 0.73, 0.77, 0.76, 0.74, 0.5)


@pytest.fixture
def runs(as_if_run):
    """By accuracies at each rate, of three seeds that differ a little."""

    def made(plain, smooth, seeds=3):
        return [
            as_if_run(config.with_seed(seed), accuracy + 1e-3 * seed * (1 if method == "plain" else 1.5))
            for method, accuracies in (("plain", plain), ("smoothout", smooth))
            for config, accuracy in zip(rates._configs(OURS, method), accuracies)
            for seed in range(seeds)
        ]

    return made


def verdict(found):
    on_held_out_images, _ = rates.rates(OURS).judge(Records(found))
    return on_held_out_images


def test_each_side_has_its_own_best_rate(runs):
    said = verdict(runs(PLAIN, SMOOTH))
    assert said.verdict == "holds"
    assert said.evidence.startswith("held-out images, rates 0.001 and 0.002: +2.05 points [")  # 0.77 and 0.75
    assert verdict(runs([*PLAIN[:3], 0.79, *PLAIN[4:]], SMOOTH)).verdict == "the opposite"
    assert verdict(runs(PLAIN, SMOOTH, seeds=2)).verdict == "too few runs"
    assert verdict(runs(PLAIN, SMOOTH)[:-3]).verdict == NOT_MEASURED


def test_a_rate_at_which_a_run_diverged_is_out(runs):
    found = runs(PLAIN, SMOOTH)
    config = rates._configs(OURS, "smoothout")[2]
    lost = [
        replace(each, run=replace(each.run, record=None, failure="the loss is nan"))
        if each.run.config == config
        else each
        for each in found
    ]
    assert "rates 0.002 and 0.002: +1.05" in verdict(lost).evidence


def test_the_papers_rate_is_the_run_of_the_choice():
    configs = [row.config for row in rates.rates(Setting()).rows if "test set" not in row.label]
    assert {held_out(OURS, C1, C1.large, method) for method in ("plain", "smoothout")} <= set(configs)
    assert {config.hold_out for config in configs} == {5000}


def test_the_rates_that_go_to_the_test_set_are_those_of_the_records(tmp_path):
    records = Records.read([], sorted(RESULTS.glob("*.jsonl")), tmp_path)
    assert rates.best_rates(OURS, records) == rates.CHOSEN_RATES


def test_rates_are_chosen_by_three_runs_of_each(runs):
    assert rates.best_rates(OURS, Records(runs(PLAIN, SMOOTH))) == {"plain": 0.002, "smoothout": 0.001}
    assert rates.best_rates(OURS, Records(runs(PLAIN, SMOOTH, seeds=2))) == {}
    assert rates.best_rates(OURS, Records(runs(PLAIN, SMOOTH)[:-3])) == {}


def test_each_side_goes_to_the_test_set_at_its_own_rate(monkeypatch, as_if_run):
    monkeypatch.setattr(rates, "CHOSEN_RATES", {})
    assert not any("test set" in row.label for row in rates.rates(OURS).rows)
    assert rates.rates(OURS).judge(Records([]))[1].verdict == NOT_MEASURED
    monkeypatch.setattr(rates, "CHOSEN_RATES", {"plain": 0.002, "smoothout": 0.001})
    monkeypatch.setitem(CHOSEN, ("c1", 5000, "smoothout"), {"strength": 0.075})  # not what the rates were chosen at
    plain, smooth = (row for row in rates.rates(OURS).rows if "test set" in row.label)
    assert [(row.config.lr, row.config.hold_out) for row in (plain, smooth)] == [(0.002, 0), (0.001, 0)]
    assert smooth.versus == plain.config
    assert smooth.config == configure(Setting(), C1, C1.large, "smoothout")  # Table 1's, which has been trained
    found = [
        as_if_run(row.config.with_seed(seed), accuracy + 1e-3 * seed)
        for row, accuracy in ((plain, 0.77), (smooth, 0.785))
        for seed in range(3)
    ]
    said = rates.rates(OURS).judge(Records(found))[1]
    assert (said.verdict, said.evidence) == ("holds", "+1.50 points [+1.50, +1.50] (n = 3)")
