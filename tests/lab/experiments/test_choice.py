"""What preset `ours` takes over: the best candidate on held-out images, as the records have it."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from scipy import stats

from smoothout.lab.cli import reproduce
from smoothout.lab.data import catalogue
from smoothout.lab.experiments import choice, finals, queue
from smoothout.lab.experiments.catalogue import EXPERIMENTS
from smoothout.lab.experiments.chosen import CHOSEN
from smoothout.lab.experiments.networks import C1, F1, RESNET44, configure
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.speeds import Speeds
from smoothout.lab.experiments.vocabulary import NOT_MEASURED, Setting

RESULTS = Path(__file__).parents[3] / "results"
OURS = Setting("paper", "ours")
NETWORKS = {network.model: network for network in (F1, C1, RESNET44)}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    files = sorted(file for file in RESULTS.glob("choice*.jsonl"))
    return Records.read([], files, tmp_path_factory.mktemp("unpacked"))


def test_what_is_entered_is_the_best_on_held_out_images(kept):
    for (model, batch_size, method), settings in CHOSEN.items():
        found = choice.decided(OURS, NETWORKS[model], batch_size, method, kept)
        assert found is not None, f"not all candidates of {model}, {batch_size}, {method} are in results/choice*.jsonl"
        assert choice.what_is_chosen(found.best.config) == settings


def test_every_place_whose_candidates_were_all_judged_is_entered(kept):
    for (network, batch_size), methods in choice.PLACES.items():
        for method in methods:
            is_known = choice.decided(OURS, network, batch_size, method, kept) is not None
            assert is_known == ((network.model, batch_size, method) in CHOSEN)


def test_runs_of_ours_wait_for_their_choice(monkeypatch):
    monkeypatch.delitem(CHOSEN, ("resnet44", 2048, "smoothout"), raising=False)
    monkeypatch.delitem(CHOSEN, ("resnet44", 2048, "plain"), raising=False)
    regime = choice.MEASURED_ANEW.settings
    monkeypatch.setitem(CHOSEN, ("resnet44", 2048, "adasmoothout"), {"strength": 0.1, **regime})
    of = partial(configure, OURS, RESNET44, 2048)
    assert choice.lacks_choice(of("adasmoothout"))  # for its baseline
    monkeypatch.setitem(CHOSEN, ("resnet44", 2048, "plain"), regime)
    assert choice.lacks_choice(of("smoothout"))
    assert not choice.lacks_choice(of("adasmoothout"))
    assert not choice.lacks_choice(of("plain"))
    assert not choice.lacks_choice(configure(replace(OURS, preset="paper"), RESNET44, 2048, "smoothout"))
    assert not any(choice.lacks_choice(row.config) for row in choice.choice(OURS).rows)
    monkeypatch.setattr(catalogue, "is_here", lambda *_: True)
    todo = queue.plan([EXPERIMENTS["table2"](OURS)], (0,), Records([]), Speeds())
    with pytest.raises(ValueError, match="not chosen for resnet44 at 2048 with smoothout yet: `smoothout reproduce"):
        reproduce._refuse_what_is_not_chosen(todo)


def test_what_the_baseline_chose_holds_for_every_method(monkeypatch, as_if_run):
    monkeypatch.delitem(CHOSEN, ("resnet44", 2048, "plain"), raising=False)
    of = partial(configure, OURS, RESNET44, 2048)
    assert choice.lacks_choice(replace(of("plain"), preset="ours"))
    regime = choice.MEASURED_ANEW.settings
    monkeypatch.setitem(CHOSEN, ("resnet44", 2048, "plain"), regime)
    for method in choice.OURS:
        for other in (choice.AS_THE_TEXT, choice.UNCUT):
            monkeypatch.setitem(CHOSEN, ("resnet44", 2048, method), {"strength": 0.1, **other.settings})
            assert choice.lacks_choice(replace(of(method), preset="ours"))  # made in another regime
        monkeypatch.setitem(CHOSEN, ("resnet44", 2048, method), {"strength": 0.1, **regime})
        assert not choice.lacks_choice(of(method))
    for method in ("plain", *choice.OURS):
        assert (of(method).lr_warmup, of(method).remeasure_bn, of(method).preset) == (5.0, "clean", "ours")
        assert of(method, lr_warmup=0.0).lr_warmup == 0.0
        as_the_text = configure(replace(OURS, preset="paper"), RESNET44, 2048, method)
        assert (as_the_text.lr_warmup, as_the_text.remeasure_bn) == (0.0, "no")
    for method in choice.OURS:
        for row in choice.candidates(OURS, RESNET44, 2048, method):
            assert row.config.lr_warmup == row.versus.lr_warmup == 5.0
            assert row.config.remeasure_bn == row.versus.remeasure_bn == "clean"
    named = [row.label for row in choice.choice(OURS).rows]
    assert len(named) == len(set(named))

    baselines = choice.candidates(OURS, RESNET44, 2048, "plain")
    runs = [as_if_run(r.config, 0.91 if r.config.lr_warmup else 0.9) for r in baselines]
    found = choice.decided(OURS, RESNET44, 2048, "plain", Records(runs))
    assert choice.what_is_chosen(found.best.config) == {"lr_warmup": 5.0, "remeasure_bn": "clean"}
    assert (found.accuracy, found.baseline) == pytest.approx((0.91, 0.9))


def test_rows_of_ours_differ_in_what_they_say_and_nothing_else(monkeypatch):
    for batch_size, network in ((256, "c1"), (5000, "c1"), (2048, "resnet44")):
        for method in ("smoothout", "adasmoothout"):
            entry = {"strength": 2 * choice.USUAL[method], "strength_schedule": "tanh", "draws": "one"}
            entry |= {"draws": "ghost", "clean_share": 0.25} if network == "resnet44" else {}
            monkeypatch.setitem(CHOSEN, (network, batch_size, method), entry)
    named = {row.label: row.config for row in EXPERIMENTS["why"](OURS).rows if row.config.method != "plain"}
    schedules = {label: config.strength_schedule for label, config in named.items() if ", strength " not in label}
    assert set(schedules.values()) == {"tanh"}, schedules
    strengths = {label: config.strength for label, config in named.items() if "the paper's" not in label}
    assert set(strengths.values()) == {0.075}, strengths
    by_draws = [label for label in named if "draw" in label]
    assert {named[label].clean_share for label in named if label not in by_draws} == {0.25}
    assert {named[label].draws for label in named if label not in by_draws} == {"ghost"}
    assert [(named[each].clean_share, named[each].draws, named[each].ghosts_per_draw) for each in by_draws] == [
        (0.5, "ghost", 1),
        (0.0, "ghost", 1),
        (0.0, "one", 1),
        (0.0, "ghost", 4),
    ]
    for name in ("table3", "table4", "table5"):  # these vary the paper's own strengths
        assert EXPERIMENTS[name](OURS).rows == EXPERIMENTS[name](replace(OURS, preset="paper")).rows
    factors = [row for row in EXPERIMENTS["why"](OURS).rows if "the paper's" in row.label]
    assert [row.config.strength for row in factors] == pytest.approx([0.009375, 0.01875, 0.0375, 0.15])
    assert all(row.config.strength_schedule != "tanh" or "tanh" in row.label for row in choice.choice(OURS).rows)


def test_what_is_entered_is_what_ours_trains_with(monkeypatch):
    monkeypatch.setitem(CHOSEN, ("c1", 5000, "smoothout"), {"strength": 0.075, "strength_schedule": "tanh"})
    monkeypatch.delitem(CHOSEN, ("c1", 256, "smoothout"), raising=False)
    config = configure(OURS, C1, 5000, "smoothout")
    assert (config.strength, config.strength_schedule, config.hold_out) == (0.075, "tanh", 0)
    assert configure(OURS, C1, 256, "smoothout").strength == 0.0375
    assert configure(replace(OURS, preset="paper"), C1, 5000, "smoothout").strength == 0.0375
    candidates = choice.candidates(OURS, C1, 5000, "smoothout")
    assert {row.config.strength for row in candidates} == {0.0375 * factor for factor in choice.FACTORS}


def test_the_best_is_the_highest_mean_and_none_while_one_is_missing(as_if_run):
    rows = choice.candidates(OURS, C1, 5000, "smoothout")
    accuracies = [0.7 + 0.01 * (i % 7) for i in range(len(rows))]

    baseline = as_if_run(choice.held_out(OURS, C1, 5000, "plain"), 0.9)
    everything = [*(as_if_run(row.config, accuracy) for row, accuracy in zip(rows, accuracies)), baseline]
    assert choice.decided(OURS, C1, 5000, "smoothout", Records(everything)).best == rows[6]
    assert choice.decided(OURS, C1, 5000, "smoothout", Records(everything[1:])) is None
    second_seed = as_if_run(rows[0].config.with_seed(1), 0.99)
    of_one = choice.decided(OURS, C1, 5000, "smoothout", Records([*everything, second_seed]))
    assert (of_one.best, of_one.seeds) == (rows[6], (0,))  # a seed that the others lack does not count
    assert (of_one.accuracy, of_one.baseline) == pytest.approx((0.76, 0.9))
    diverged = replace(everything[6], run=replace(everything[6].run, failure="the loss is nan"))
    without = Records([*everything[:6], diverged, *everything[7:]])
    assert choice.decided(OURS, C1, 5000, "smoothout", without).best == rows[5]


def test_finalists_are_chosen_from_by_fresh_seeds_once_there_are_enough(as_if_run):
    first = choice.candidates(OURS, RESNET44, 2048, "adasmoothout")
    last = choice.finalists(OURS, "adasmoothout")
    again = last[0]
    flattered = replace(again.config, stop_after=0)
    assert flattered in {row.config for row in first}  # there to the end

    def runs(seed, rows, accuracies):
        made = [as_if_run(row.config.with_seed(seed), value) for row, value in zip(rows, accuracies)]
        return [*made, as_if_run(rows[0].versus.with_seed(seed), 0.9)]

    of_choice = runs(100, first, [0.95 if row.config == flattered else 0.91 for row in first])
    highest = [0.91 if row is again else 0.92 for row in last]
    highest[1] = 0.93
    few = [run for seed in (102, 103) for run in runs(seed, last, highest)]
    enough = few + runs(104, last, highest)

    def decided(found):
        return choice.decided(OURS, RESNET44, 2048, "adasmoothout", Records(found))

    assert decided(of_choice).best.config == decided(of_choice + few).best.config == flattered
    found = decided(of_choice + enough)
    assert (found.best, found.seeds) == (last[1], choice.FINAL_SEEDS)  # not by the run that flatters
    assert "stop_after" not in choice.what_is_chosen(found.best.config)

    def judged(found):
        return finals.finals(OURS).judge(Records(found))[:-1]  # the last one is on BatchNorm

    verdicts = judged(enough)
    assert [v.verdict for v in verdicts] == ["4 of 4", "1 of 4", "2 of 4", "2 of 4"]
    assert verdicts[1].evidence == "93.00 % against 90.00 % of the baseline, n = 3"
    assert [v.verdict for v in judged(few)] == [v.verdict for v in verdicts]  # so far
    assert {v.verdict for v in judged(of_choice)} == {NOT_MEASURED}


def test_a_finalist_that_diverged_is_out_and_said_to_be(as_if_run):
    rows = choice.finalists(OURS, "adasmoothout")
    runs = [as_if_run(row.config, 0.9 + 0.01 * i) for i, row in enumerate(rows)] + [as_if_run(rows[0].versus, 0.9)]
    runs[2] = replace(runs[2], run=replace(runs[2].run, failure="the loss is nan"))
    said = [verdict.verdict for verdict in finals.finals(OURS).judge(Records(runs))]
    assert said == ["3 of 3", "2 of 3", "diverged", "1 of 3", "1 runs diverged"]


def test_finals_say_what_noise_on_normalisation_does_in_the_mean_of_both_strengths(as_if_run):
    rows = choice.finalists(OURS, "adasmoothout")
    assert [(row.config.strength, row.config.perturb_bn) for row in rows] == [
        (0.3, False),
        (0.3, True),
        (0.15, False),
        (0.15, True),
    ]

    def judged(accuracies, deviation=0.001):
        runs = [
            as_if_run(row.config.with_seed(seed), accuracy + (seed - 103) * deviation)
            for row, accuracy in zip(rows, accuracies)
            for seed in choice.FINAL_SEEDS
        ]
        return finals.finals(OURS).judge(Records(runs))[-1]

    found = judged([0.91, 0.92, 0.91, 0.93])
    assert found.verdict == "holds"
    half = stats.t.ppf(0.975, 8) * 0.1 * math.sqrt(4 / 3) / 2
    assert found.evidence == f"+1.50 points [{1.5 - half:+.2f}, {1.5 + half:+.2f}] (n = 3)"
    assert judged([0.92, 0.92, 0.93, 0.91]).verdict == "the opposite"
    assert judged([0.91, 0.92, 0.91, 0.92], 0.02).verdict == "no difference measured"


def test_both_rounds_of_the_finals_have_their_own_seeds_and_no_other():
    wanted, _ = queue._wanted([finals.finals(OURS)], (100, 101, 102))
    assert {config.seed for config in wanted if not config.stop_after} == {101}
    assert {config.seed for config in wanted if config.stop_after} == {102}


def test_no_label_names_two_runs():
    rows = {(row.label, row.config) for row in (*finals.finals(OURS).rows, *choice.choice(OURS).rows)}
    assert len({label for label, _ in rows}) == len(rows)


def test_no_preset_but_ours_chooses():
    for name in ("choice", "finals", "lengths"):
        rows = [EXPERIMENTS[name](replace(OURS, preset=preset)).rows for preset in ("paper", "ours")]
        assert rows[0] == rows[1]
        assert {row.config.preset for row in rows[0]} == {"ours"}


def test_what_statistics_measured_anew_change_is_listed_setting_by_setting_and_nothing_concluded(as_if_run):
    rows = [choice.deep_baseline(OURS, choice.MEASURED_ANEW)]
    rows += choice.candidates(OURS, RESNET44, 2048, "adasmoothout")
    runs = []
    for number, row in enumerate(rows):
        found = as_if_run(row.config, 0.9)
        before = {"test_loss": 0.3, "test_accuracy": 0.9 - 0.001 * number}
        runs.append(replace(found, run=replace(found.run, record=replace(found.run.record, as_trained=before))))
    (said,) = (v for v in choice.choice(OURS).judge(Records(runs)) if "measured anew raise" in v.claim)
    assert said.verdict == "run by run"
    assert said.evidence == (
        "baseline +0.00; AdaSmoothOut, a = 0.15 +0.10; AdaSmoothOut, a = 0.3 +0.20; AdaSmoothOut, a = 0.3, "
        "tanh-falling +0.30; AdaSmoothOut, a = 0.3, 50 % of ghosts clean +0.40; AdaSmoothOut, a = 0.6, 50 % of ghosts "
        "clean +0.50"
    )
