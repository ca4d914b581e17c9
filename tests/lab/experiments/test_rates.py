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
            as_if_run(LARGE.held_out(OURS, method, values).with_seed(seed), accuracy + 1e-3 * i)
            for method, of_method in accuracies.items()
            for values, accuracy in zip(round_.tried[method], of_method, strict=True)
            for i, seed in enumerate(seeds)
        ]

    return made


def best(found, method, round_=FIRST):
    return rates.best_of(OURS, LARGE, round_, method, Records(found))


def verdicts(found):
    return {verdict.claim: verdict for verdict in rates.rates(OURS).judge(Records(found))}


def as_lost(found):
    return replace(found, run=replace(found.run, record=None, failure="the loss is nan"))


def test_the_best_by_the_mean_of_all_seeds_that_choose(runs):
    both = runs(plain=PLAIN, smoothout=SMOOTH)
    assert best(both, "plain") == {"lr": 0.002}
    assert best(both, "smoothout") == {"lr": 0.001}
    assert best(both[:-1], "plain") == {"lr": 0.002}  # what the other side lacks is no matter
    assert best(both[:-1], "smoothout") is None
    assert best(runs(seeds=(0, 1, 7), plain=PLAIN), "plain") is None


def test_other_seeds_have_no_part_in_the_choice(runs):
    lost = LARGE.held_out(OURS, "plain", {"lr": 0.002}).with_seed(8)
    others = [as_lost(each) if each.run.config == lost else each for each in runs(seeds=(8, 9), plain=PLAIN[::-1])]
    found = [*runs(plain=PLAIN), *others]
    assert best(found, "plain") == {"lr": 0.002}
    assert verdicts(found)["C1, CIFAR-10, batch 5000: baseline: the best of 6 on held-out images"].evidence == (
        "75.10 %, n = 3"
    )


def test_a_rate_at_which_a_run_diverged_is_out(runs):
    config = LARGE.held_out(OURS, "smoothout", {"lr": 0.001})
    found = [as_lost(each) if each.run.config == config else each for each in runs(smoothout=SMOOTH)]
    assert best(found, "smoothout") == {"lr": 0.002}


def test_strengths_are_chosen_with_the_rates(runs):
    tried = SECOND.tried["smoothout"]
    accuracies = [0.7 + 0.01 * (values == {"lr": 0.008, "strength": 0.075}) for values in tried]
    assert best(runs(round_=SECOND, smoothout=accuracies), "smoothout", SECOND) == {"lr": 0.008, "strength": 0.075}


HIGHEST, LOWEST = "(the highest tried)", "(the lowest tried)"


@pytest.mark.parametrize(
    ("winner", "said"),
    [
        ({"lr": 0.064}, f"strength 0.0375, lr 0.064 {HIGHEST}"),
        ({"lr": 0.032}, "strength 0.0375, lr 0.032"),
        ({"lr": 0.004}, f"strength 0.0375 {LOWEST}, lr 0.004"),
        ({"lr": 0.008, "strength": 0.075}, "strength 0.075, lr 0.008"),
        ({"lr": 0.016, "strength": 0.15}, f"strength 0.15 {HIGHEST}, lr 0.016 {HIGHEST}"),
        ({"lr": 0.002, "strength": 0.15}, f"strength 0.15 {HIGHEST}, lr 0.002 {LOWEST}"),
    ],
)
def test_a_choice_at_the_edge_of_what_was_tried_says_so(runs, winner, said):
    accuracies = [0.8 if values == winner else 0.7 for values in SECOND.tried["smoothout"]]
    found = verdicts(runs(round_=SECOND, smoothout=accuracies))
    assert found["C1, CIFAR-10, batch 5000: SmoothOut: the best of 17 on held-out images"].verdict == said


def test_no_gain_is_claimed_by_the_runs_that_choose(runs):
    said = [
        verdict.verdict for claim, verdict in verdicts(runs(plain=PLAIN, smoothout=SMOOTH)).items() if "gains" in claim
    ]
    methods = [method for each in rates.CONTESTS for round_ in each.rounds for method in round_.tried]
    assert said == [NOT_MEASURED] * (len(methods) - methods.count("plain"))


def test_every_claim_and_every_row_has_a_name_of_its_own():
    experiment = rates.rates(OURS)
    labels = [row.label for row in experiment.rows]
    claims = [verdict.claim for verdict in experiment.judge(Records([]))]
    assert len(set(labels)) == len(labels)
    assert len(set(claims)) == len(claims)


def test_it_is_the_same_in_every_preset():
    assert rates.rates(Setting("paper", "authors")).rows == rates.rates(OURS).rows


def test_at_the_papers_rate_the_runs_of_other_studies_serve(tmp_path):
    packs = [RESULTS / f"{name}.jsonl" for name in ("choice-ours", "claims-c1", "choice-resnet44-clean")]
    records = Records.read([], [*packs, RESULTS / "choice-resnet44-finals.jsonl"], tmp_path)
    for contest, method in ((LARGE, "plain"), (LARGE, "smoothout"), (DEEP, "plain")):
        usual = {"lr": 0.1 if contest is DEEP else 0.001}
        assert usual in contest.rounds[0].tried[method]
        there = {run.run.config.seed for run in records.seeds_of(contest.held_out(OURS, method, usual))}
        assert there >= set(contest.seeds)


def test_noise_is_held_against_the_baseline_of_its_rate():
    tried = [row for row in rates.rates(OURS).rows if row.config.hold_out]
    strong = LARGE.held_out(OURS, "smoothout", {"lr": 0.004, "strength": 0.15})
    (row,) = (row for row in tried if row.config == strong)
    assert row.versus == LARGE.held_out(OURS, "plain", {"lr": 0.004})
    assert row.label.endswith("SmoothOut, a rate of 0.004, a = 0.15")
    assert {row.versus for row in tried} - {None} <= {row.config for row in tried}
    assert all(row.seeds in {contest.seeds for contest in rates.CONTESTS} for row in tried)


@pytest.mark.parametrize(
    ("contest", "round_", "method"),
    [(contest, round_, method) for contest in rates.CONTESTS for round_ in contest.rounds for method in round_.tried],
    ids=lambda each: each if isinstance(each, str) else each.title if isinstance(each, rates.Contest) else each.name,
)
def test_what_goes_to_the_test_set_is_what_the_records_say(contest, round_, method, all_records):
    assert rates.best_of(OURS, contest, round_, method, all_records) == round_.chosen.get(method)


@pytest.fixture(scope="module")
def all_records(tmp_path_factory):
    return Records.read([], sorted(RESULTS.glob("*.jsonl")), tmp_path_factory.mktemp("unpacked"))


def with_rounds(monkeypatch, contest, *rounds):
    monkeypatch.setattr(rates, "CONTESTS", (replace(contest, rounds=rounds),))


def test_each_side_goes_to_the_test_set_at_its_own_rate(monkeypatch, as_if_run, runs):
    with_rounds(monkeypatch, LARGE, replace(FIRST, chosen={"smoothout": {"lr": 0.001}}))
    assert all(row.config.hold_out for row in rates.rates(OURS).rows)  # what is it to be compared with?
    with_rounds(monkeypatch, LARGE, replace(FIRST, chosen={"plain": {"lr": 0.002}, "smoothout": {"lr": 0.001}}))
    monkeypatch.setitem(CHOSEN, ("c1", 5000, "smoothout"), {"strength": 0.075})  # not what the rates were chosen at
    *tried, plain, smooth = rates.rates(OURS).rows
    assert all(row.config.hold_out for row in tried)
    assert plain.config == configure(Setting("paper", "paper"), C1, C1.large, "plain", lr=0.002)
    assert smooth.config == configure(Setting("paper", "paper"), C1, C1.large, "smoothout", lr=0.001)
    assert (smooth.versus, smooth.seeds) == (plain.config, (0, 1, 2, 3, 4))
    assert [wanted.kind for wanted in smooth.measurements] == ["sharpness", "sensitivity"]
    found = [
        as_if_run(row.config.with_seed(seed), accuracy, best=0.9)
        for row, accuracies in ((plain, (0.770, 0.771, 0.775)), (smooth, (0.784, 0.787, 0.790)))
        for seed, accuracy in enumerate(accuracies)
    ]
    claim = f"C1, CIFAR-10, batch 5000: SmoothOut gains over the baseline on the test set, {FIRST.name}"
    said = verdicts(found)[claim]
    assert (said.verdict, said.evidence) == ("holds", "+1.50 points [+1.25, +1.75] (n = 3)")
    found += runs(plain=PLAIN, smoothout=SMOOTH)
    (line,) = digest([(OURS, rates.rates(OURS))], Records(found)).to_markdown().splitlines()[2:]
    assert line.startswith(f"| C1, CIFAR-10, batch 5000, {FIRST.name}, preset ours | 3 | 77.20")
    assert "+1.50 [+1.25, +1.75]" in line


def test_a_choice_that_stays_is_held_against_the_baseline_of_its_round(monkeypatch):
    once = replace(FIRST, chosen={"plain": {"lr": 0.002}, "smoothout": {"lr": 0.001}})
    again = replace(once, name="once more")
    other = replace(once, name="another baseline", chosen={**once.chosen, "plain": {"lr": 0.004}})
    with_rounds(monkeypatch, LARGE, once, again, other)
    rows = [row for row in rates.rates(OURS).rows if not row.config.hold_out]
    assert [(row.config.lr, row.versus and row.versus.lr) for row in rows] == [
        (0.002, None),
        (0.001, 0.002),
        (0.004, None),
        (0.001, 0.004),
    ]


def test_resnet44_goes_to_the_test_set_as_preset_ours_trains(monkeypatch):
    with_rounds(monkeypatch, DEEP, replace(DEEP.rounds[0], chosen={"plain": {"lr": 0.2}}))
    (row,) = (row for row in rates.rates(OURS).rows if not row.config.hold_out)
    assert row.config == resnet44(OURS, "plain", lr=0.2)
    assert row.versus is None
    assert not rates.rates(OURS).drawings  # of three rates and two decays


def test_the_picture_has_a_line_a_strength(runs):
    drawing, *_ = rates.rates(OURS).drawings
    assert paper_figures.drawn(drawing, Records([])) is None
    strong = {"lr": 0.004, "strength": 0.15}
    more = [0.6 + 0.1 * (values == strong) for values in SECOND.tried["smoothout"]]
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
