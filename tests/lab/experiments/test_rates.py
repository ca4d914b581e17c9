"""Learning rates: each side has its best, and the verdict is of those two."""

from dataclasses import replace
from pathlib import Path

import pytest

from smoothout.lab.experiments import rates
from smoothout.lab.experiments.choice import held_out
from smoothout.lab.experiments.chosen import CHOSEN
from smoothout.lab.experiments.networks import C1, configure
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.table2 import resnet44
from smoothout.lab.experiments.vocabulary import NOT_MEASURED, Setting
from smoothout.lab.report import paper_figures
from smoothout.lab.report.digest import digest
from smoothout.measure import plots

RESULTS = Path(__file__).parents[3] / "results"
OURS = Setting("paper", "ours")
SHALLOW, DEEP = rates.CONTESTS
FIRST, SECOND = SHALLOW.rounds
PLAIN, SMOOTH = (0.70, 0.72, 0.73, 0.75, 0.74, 0.71), (0.71, 0.73, 0.77, 0.76, 0.74, 0.5)


@pytest.fixture
def runs(as_if_run):
    """By accuracies of what was tried, of three seeds that differ a little."""

    def made(plain, smooth, seeds=3, contest=SHALLOW, round_=FIRST):
        return [
            as_if_run(contest.held_out(OURS, method, **settings).with_seed(seed), accuracy + 1e-3 * i * more)
            for method, accuracies, more in ((contest.sides[0], plain, 1), (contest.sides[1], smooth, 1.5))
            for settings, accuracy in zip(contest.tried(round_, method), accuracies, strict=True)
            for i, seed in enumerate(contest.seeds[:seeds])
        ]

    return made


@pytest.fixture
def with_round(monkeypatch):
    """One round alone."""

    def put(contest, **settings):
        alone = contest._replace(rounds=(contest.rounds[0]._replace(**settings),))
        monkeypatch.setattr(rates, "CONTESTS", (alone,))
        return alone

    return put


def verdict(found):
    on_held_out_images, *_ = rates.rates(OURS).judge(Records(found))
    return on_held_out_images


def test_each_side_has_its_own_best_rate(runs):
    said = verdict(runs(PLAIN, SMOOTH))
    assert said.verdict == "holds"
    assert said.evidence.startswith("held-out images, lr 0.001 against lr 0.002: +2.05 points [")  # 0.77 and 0.75
    assert verdict(runs([*PLAIN[:3], 0.79, *PLAIN[4:]], SMOOTH)).verdict == "the opposite"
    assert verdict(runs(PLAIN, SMOOTH, seeds=2)).verdict == "too few runs"
    assert verdict(runs(PLAIN, SMOOTH)[:-3]).verdict == NOT_MEASURED


def test_a_rate_at_which_a_run_diverged_is_out(runs):
    found = runs(PLAIN, SMOOTH)
    config = SHALLOW.held_out(OURS, "smoothout", lr=0.001)
    lost = [
        replace(each, run=replace(each.run, record=None, failure="the loss is nan"))
        if each.run.config == config
        else each
        for each in found
    ]
    assert "lr 0.002 against lr 0.002: +1.05" in verdict(lost).evidence


def test_the_papers_rate_is_the_run_of_the_choice():
    tried = [row.config for row in rates.rates(Setting()).rows if row.config.hold_out]
    assert {held_out(OURS, C1, C1.large, method) for method in ("plain", "smoothout")} <= set(tried)
    assert {config.hold_out for config in tried} == {5000}


def test_what_resnet44_tries_goes_around_the_winner_of_the_finals(tmp_path):
    records = Records.read([], [RESULTS / "choice-resnet44-finals.jsonl"], tmp_path)
    for method in DEEP.sides:
        as_it_is, *others = (DEEP.held_out(OURS, method, **settings) for settings in DEEP.tried(DEEP.rounds[0], method))
        assert {run.run.config.seed for run in records.seeds_of(as_it_is)} >= set(DEEP.seeds)
        assert {(config.lr, config.weight_decay) for config in others} == {(0.05, 1e-4), (0.2, 1e-4), (0.1, 5e-4)}


def test_a_stronger_noise_is_held_against_the_baseline_of_its_rate():
    rows = {row.config: row for row in rates.rates(OURS).rows}
    strong = rows[SHALLOW.held_out(OURS, "smoothout", lr=0.004, strength=0.15)]
    assert strong.versus == SHALLOW.held_out(OURS, "plain", lr=0.004)
    assert strong.label.endswith("SmoothOut, a rate of 0.004, a = 0.15")


@pytest.mark.parametrize(
    ("contest", "round_"),
    [(contest, round_) for contest in rates.CONTESTS for round_ in contest.rounds],
    ids=lambda each: each.what if isinstance(each, rates.Round) else each.network.model,
)
def test_what_goes_to_the_test_set_is_what_the_records_say(contest, round_, tmp_path):
    records = Records.read([], sorted(RESULTS.glob("*.jsonl")), tmp_path)
    assert rates.best_of(OURS, contest, round_, records) == round_.chosen


def test_rates_are_chosen_by_three_runs_of_each(runs):
    def best(found):
        return rates.best_of(OURS, SHALLOW, FIRST, Records(found))

    assert best(runs(PLAIN, SMOOTH)) == ({"lr": 0.002}, {"lr": 0.001})
    assert best(runs(PLAIN, SMOOTH, seeds=2)) is None
    assert best(runs(PLAIN, SMOOTH)[:-3]) is None


def test_strengths_are_chosen_with_the_rates(runs):
    smooth = [*SMOOTH, 0.7, 0.7, *([0.76] * 7), 0.78]
    found = Records(runs([*PLAIN, 0.76, 0.6], smooth, round_=SECOND))
    assert rates.best_of(OURS, SHALLOW, SECOND, found) == ({"lr": 0.016}, {"lr": 0.016, "strength": 0.15})


def test_each_side_goes_to_the_test_set_at_its_own_rate(with_round, monkeypatch, as_if_run):
    with_round(SHALLOW, chosen=None)
    assert not any("test set" in row.label for row in rates.rates(OURS).rows)
    assert rates.rates(OURS).judge(Records([]))[1].verdict == NOT_MEASURED
    with_round(SHALLOW, chosen=({"lr": 0.002}, {"lr": 0.001}))
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
    in_short = digest([(OURS, rates.rates(OURS))], Records(found)).to_markdown()
    assert in_short.count("+1.50 [+1.50, +1.50]") == 1
    assert "78.6" in in_short  # and nothing of the held-out images
    assert len(in_short.splitlines()) == 3


def test_resnet44_goes_to_the_test_set_to_the_end(with_round):
    with_round(DEEP, chosen=({"lr": 0.2}, {"weight_decay": 5e-4}))
    plain, ada = (row.config for row in rates.rates(OURS).rows if "test set" in row.label)
    assert plain == resnet44(OURS, "plain", lr=0.2)
    assert ada == resnet44(OURS, "adasmoothout", weight_decay=5e-4)
    assert (ada.stop_after, ada.hold_out) == (0, 0)


def test_the_picture_has_a_line_a_strength(runs):
    (drawing,) = rates.rates(OURS).drawings
    assert paper_figures.drawn(drawing, Records([])) is None
    axes = plots.new_axes()
    paper_figures.drawn(drawing, Records(runs(PLAIN, SMOOTH)))(axes)
    lines = {bars.get_label(): bars.lines[0] for bars in axes.containers}
    assert list(lines) == ["baseline (n = 3)", "SmoothOut, a = 0.0375 (n = 3)"]
    assert list(lines["baseline (n = 3)"].get_xdata()) == [0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008]
    assert lines["baseline (n = 3)"].get_ydata() == pytest.approx([100 * each + 0.1 for each in PLAIN])
