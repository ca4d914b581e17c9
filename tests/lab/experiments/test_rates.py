"""Learning rates: each side goes to the test set at its best, and is compared there alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from smoothout.lab.experiments import rates
from smoothout.lab.experiments.chosen import CHOSEN
from smoothout.lab.experiments.networks import C1, configure
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.table2 import resnet44
from smoothout.lab.experiments.vocabulary import NOT_MEASURED, Setting
from smoothout.lab.report import figures, paper_figures
from smoothout.lab.report.digest import digest
from smoothout.measure import plots

RESULTS = Path(__file__).parents[3] / "results"
OURS = Setting("paper", "ours")
LARGE, _, _, DEEP = rates.CONTESTS
FIRST, SECOND = LARGE.rounds
PLAIN, SMOOTH = (0.70, 0.72, 0.73, 0.75, 0.74, 0.71), (0.71, 0.73, 0.77, 0.76, 0.74, 0.5)


@pytest.fixture
def runs(as_if_run):
    """By accuracies of what was tried, of seeds that differ a little."""

    def made(seeds=LARGE.seeds, round_=FIRST, **accuracies):
        return [
            as_if_run(LARGE.held_out(OURS, method, settings).with_seed(seed), accuracy + 1e-3 * i)
            for method, of_method in accuracies.items()
            for settings, accuracy in zip(round_.tried[method], of_method, strict=True)
            for i, seed in enumerate(seeds)
        ]

    return made


def best(found, method, round_=FIRST):
    return rates.best_of(OURS, LARGE, round_, method, Records(found))


def verdicts(found):
    return {verdict.claim: verdict for verdict in rates.rates(OURS).judge(Records(found))}


def test_the_best_by_the_mean_of_all_seeds_that_choose(runs):
    both = runs(plain=PLAIN, smoothout=SMOOTH)
    assert best(both, "plain") == {"lr": 0.002}
    assert best(both, "smoothout") == {"lr": 0.001}
    assert best(both[:-1], "plain") == {"lr": 0.002}  # what the other side lacks is no matter
    assert best(both[:-1], "smoothout") is None
    others = runs(seeds=(0, 1, 7), plain=PLAIN)
    assert best(others, "plain") is None


def test_a_rate_at_which_a_run_diverged_is_out(runs):
    config = LARGE.held_out(OURS, "smoothout", {"lr": 0.001})
    lost = [
        replace(each, run=replace(each.run, record=None, failure="the loss is nan"))
        if each.run.config == config
        else each
        for each in runs(smoothout=SMOOTH)
    ]
    assert best(lost, "smoothout") == {"lr": 0.002}


def test_strengths_are_chosen_with_the_rates(runs):
    tried = SECOND.tried["smoothout"]
    accuracies = [0.7 + 0.01 * (settings == {"lr": 0.016, "strength": 0.15}) for settings in tried]
    assert best(runs(round_=SECOND, smoothout=accuracies), "smoothout", SECOND) == {"lr": 0.016, "strength": 0.15}


def test_a_choice_at_the_edge_of_what_was_tried_says_so(runs):
    said = verdicts(runs(plain=sorted(PLAIN), smoothout=SMOOTH))
    of = "C1, CIFAR-10, batch 5000: {}: the best of 6 on held-out images"
    assert (said[of.format("baseline")].verdict, said[of.format("SmoothOut")].verdict) == (
        "lr 0.008 (the highest tried)",
        "lr 0.001",
    )
    assert said[of.format("SmoothOut")].evidence == "77.10 %, n = 3"
    lowest = verdicts(runs(plain=sorted(PLAIN, reverse=True)))[of.format("baseline")]
    assert lowest.verdict == "lr 0.00025 (the lowest tried)"


def test_no_gain_is_claimed_by_the_runs_that_choose(runs):
    said = verdicts(runs(plain=PLAIN, smoothout=SMOOTH))
    assert {verdict.verdict for claim, verdict in said.items() if "gains" in claim} == {NOT_MEASURED}


def test_every_claim_and_every_row_has_a_name_of_its_own():
    experiment = rates.rates(OURS)
    labels = [row.label for row in experiment.rows]
    claims = [verdict.claim for verdict in experiment.judge(Records([]))]
    assert len(set(labels)) == len(labels)
    assert len(set(claims)) == len(claims)


def test_at_the_papers_rate_the_runs_of_other_studies_serve(tmp_path):
    packs = [RESULTS / f"{name}.jsonl" for name in ("choice-ours", "claims-c1", "choice-resnet44-clean")]
    records = Records.read([], [*packs, RESULTS / "choice-resnet44-finals.jsonl"], tmp_path)
    for contest, method in ((LARGE, "plain"), (LARGE, "smoothout"), (DEEP, "plain")):
        usual = {"lr": 0.1 if contest is DEEP else 0.001}
        assert usual in contest.rounds[0].tried[method]
        there = {run.run.config.seed for run in records.seeds_of(contest.held_out(OURS, method, usual))}
        assert there >= set(contest.seeds)


def test_noise_is_held_against_the_baseline_of_its_rate():
    rows = {row.config: row for row in rates.rates(OURS).rows}
    strong = rows[LARGE.held_out(OURS, "smoothout", {"lr": 0.004, "strength": 0.15})]
    assert strong.versus == LARGE.held_out(OURS, "plain", {"lr": 0.004})
    assert strong.label.endswith("SmoothOut, a rate of 0.004, a = 0.15")
    assert all(row.versus is None or row.versus in rows for row in rows.values())


@pytest.mark.parametrize(
    ("contest", "round_", "method"),
    [(contest, round_, method) for contest in rates.CONTESTS for round_ in contest.rounds for method in round_.tried],
    ids=lambda each: each if isinstance(each, str) else each.title if isinstance(each, rates.Contest) else each.what,
)
def test_what_goes_to_the_test_set_is_what_the_records_say(contest, round_, method, all_records):
    assert rates.best_of(OURS, contest, round_, method, all_records) == round_.chosen.get(method)


@pytest.fixture(scope="module")
def all_records(tmp_path_factory):
    return Records.read([], sorted(RESULTS.glob("*.jsonl")), tmp_path_factory.mktemp("unpacked"))


def with_rounds(monkeypatch, contest, *rounds):
    monkeypatch.setattr(rates, "CONTESTS", (replace(contest, rounds=rounds),))


def test_each_side_goes_to_the_test_set_at_its_own_rate(monkeypatch, as_if_run, runs):
    with_rounds(monkeypatch, LARGE, replace(FIRST, chosen={}))
    assert all(row.config.hold_out for row in rates.rates(OURS).rows)
    chosen = {"plain": {"lr": 0.002}, "smoothout": {"lr": 0.001}}
    with_rounds(monkeypatch, LARGE, replace(FIRST, chosen=chosen), replace(FIRST, what="once more", chosen=chosen))
    monkeypatch.setitem(CHOSEN, ("c1", 5000, "smoothout"), {"strength": 0.075})  # not what the rates were chosen at
    plain, smooth = (row for row in rates.rates(OURS).rows if not row.config.hold_out)
    assert plain.config == configure(Setting("paper", "paper"), C1, C1.large, "plain", lr=0.002)
    assert smooth.config == configure(Setting("paper", "paper"), C1, C1.large, "smoothout", lr=0.001)
    assert (smooth.versus, smooth.seeds) == (plain.config, (0, 1, 2, 3, 4))
    found = [
        as_if_run(row.config.with_seed(seed), accuracy + 1e-3 * seed)
        for row, accuracy in ((plain, 0.77), (smooth, 0.785))
        for seed in range(3)
    ]
    claim = f"C1, CIFAR-10, batch 5000: SmoothOut gains over the baseline on the test set, {FIRST.what}"
    said = verdicts(found)[claim]
    assert (said.verdict, said.evidence) == ("holds", "+1.50 points [+1.50, +1.50] (n = 3)")
    found += runs(plain=PLAIN, smoothout=SMOOTH)
    (line,) = digest([(OURS, rates.rates(OURS))], Records(found)).to_markdown().splitlines()[2:]
    assert line.startswith(f"| C1, CIFAR-10, batch 5000, {FIRST.what}, preset ours | 3 | 77.10")
    assert "+1.50 [+1.50, +1.50]" in line


def test_resnet44_goes_to_the_test_set_as_preset_ours_trains(monkeypatch):
    with_rounds(monkeypatch, DEEP, replace(DEEP.rounds[0], chosen={"plain": {"lr": 0.2}}))
    (row,) = (row for row in rates.rates(OURS).rows if not row.config.hold_out)
    assert row.config == resnet44(OURS, "plain", lr=0.2)
    assert row.versus is None


def test_the_picture_has_a_line_a_strength(runs):
    drawing, *_ = rates.rates(OURS).drawings
    assert paper_figures.drawn(drawing, Records([])) is None
    strong = {"lr": 0.004, "strength": 0.15}
    more = [0.6 + 0.1 * (settings == strong) for settings in SECOND.tried["smoothout"]]
    found = [
        *runs(plain=PLAIN, smoothout=SMOOTH),
        *(run for run in runs(round_=SECOND, smoothout=more) if run.run.config.strength == 0.15),
    ]
    axes = plots.new_axes()
    paper_figures.drawn(drawing, Records(found[::-1]))(axes)
    lines = {bars.get_label(): bars for bars in axes.containers}
    baseline, usual, stronger = lines.values()
    assert list(lines) == ["baseline (n = 3)", "SmoothOut, a = 0.0375 (n = 3)", "SmoothOut, a = 0.15 (n = 3)"]
    assert list(baseline.lines[0].get_xdata()) == [0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008]
    assert baseline.lines[0].get_ydata() == pytest.approx([100 * each + 0.1 for each in PLAIN])
    assert list(stronger.lines[0].get_ydata()) == pytest.approx([60.1, 70.1, 60.1, 60.1])
    (bar, *_) = baseline.lines[2][0].get_segments()
    assert bar[1][1] - bar[0][1] == pytest.approx(0.2)  # two deviations of 0.1
    assert usual.lines[0].get_color() == figures.COLOURS["smoothout"] != stronger.lines[0].get_color()
