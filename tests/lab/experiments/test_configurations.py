"""Every experiment's configurations: they resolve, differ from one another, and carry the paper's numbers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from smoothout.lab.experiments.catalogue import EXPERIMENTS, asked_for
from smoothout.lab.experiments.chosen import CHOSEN
from smoothout.lab.experiments.networks import C1, RESNET44, configure
from smoothout.lab.experiments.table2 import PLUMBING
from smoothout.lab.experiments.vocabulary import Setting
from smoothout.lab.presets import PRESETS

RESULTS = Path(__file__).parents[3] / "results"
NAMES = {f"table{i}" for i in range(1, 6)} | {f"figure{i}" for i in (1, 2, 4, 5, 6, 7, 8, 9)} | {"claims", "ncopy"}


def test_every_table_and_figure_of_the_paper_is_there():
    assert set(EXPERIMENTS) >= NAMES
    with pytest.raises(ValueError, match="did you mean 'table1'"):
        asked_for(["tabel1"], Setting())


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_rows_are_different_runs_of_the_preset(name, preset):
    experiment = EXPERIMENTS[name](Setting("paper", preset))
    configs = [row.config for row in experiment.rows]
    assert len({config.hash for config in configs}) == len(configs)
    assert all((config.preset in (preset, "paper") or config.hold_out) and config.seed == 0 for config in configs)
    assert len({row.label for row in experiment.rows}) == len(configs)
    assert all(row.versus is None or row.versus in configs for row in experiment.rows)
    ends = {end for line in experiment.lines for end in (line.start, line.end)}
    curves = {curve.config for drawing in experiment.drawings for curve in drawing.curves}
    assert ends | curves <= set(configs)
    wanted = {m for row in experiment.rows for m in row.measurements} | set(experiment.lines)
    of = {curve.of for drawing in experiment.drawings for curve in drawing.curves} - {None}  # epochs need none
    assert of <= wanted


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tiny_scale_has_the_same_rows_on_the_digits(name, monkeypatch):
    for batch_size in (256, 5000):  # at paper scale SAM waits for it
        monkeypatch.setitem(CHOSEN, ("c1", batch_size, "sam"), {"strength": 0.05})
    tiny, paper = (EXPERIMENTS[name](Setting(scale)) for scale in ("tiny", "paper"))
    assert all(row.config.dataset == "digits" and row.config.epochs <= 16 for row in tiny.rows)
    if name != "ncopy":  # fewer copies
        assert {row.label for row in tiny.rows} <= {row.label for row in paper.rows} or name in ("table2", "why")
        assert [m.name for row in tiny.rows for m in row.measurements][:9] == [
            m.name for row in paper.rows for m in row.measurements
        ][:9]


def test_at_tiny_scale_a_run_stops_where_it_does_at_the_papers():
    tiny, paper = ([row.config for row in EXPERIMENTS["why"](Setting(scale)).rows] for scale in ("tiny", "paper"))
    for configs in (tiny, paper):
        assert {config.epochs_trained / config.epochs for config in configs} == {0.5, 1.0}


def test_table_1_has_the_improvements_that_the_paper_prints():
    experiment = EXPERIMENTS["table1"](Setting())
    accuracy = {row.config: row.accuracy for row in experiment.rows}
    gains = [round(r.accuracy - accuracy[r.versus], 2) for r in experiment.rows if r.accuracy and r.versus]
    assert gains == [0.12, 0.41, 2.05, 3.04, 3.18, 4.06]


def test_table_1_is_the_runs_that_were_measured():
    lines = (RESULTS / "c1-cifar10.jsonl").read_text().splitlines()
    measured = {json.loads(line)["files"]["config.json"]["hash"] for line in lines}
    rows = EXPERIMENTS["table1"](Setting("paper", "paper")).rows
    ours = {row.config.with_seed(seed).hash for row in rows if row.config.model == "c1" for seed in range(5)}
    assert ours == measured
    assert len(ours) == 30


def test_tables_3_to_5_have_the_papers_noise_and_accuracies():
    def of(name, model):
        rows = [(row.config, row.accuracy) for row in EXPERIMENTS[name](Setting()).rows if row.config.model == model]
        return [(c.method, c.noise, c.strength, c.denoise, accuracy) for c, accuracy in rows if c.method != "plain"]

    smooth, ada = ("smoothout", "uniform", 0.0375, True, 91.95), ("adasmoothout", "uniform", 0.15, True, 92.63)
    left = ("smoothout", "uniform", 1e-4, False, 91.15)
    assert of("table3", "resnet44") == [smooth, (*smooth[:3], False, 27.57)]
    assert [row[-1] for row in of("table3", "c1")] == [81.72, 36.52, 80.34, 46.05]
    assert of("table4", "resnet44") == [smooth, left, ada, ("adasmoothout", "uniform", 7.5e-4, False, 91.54)]
    gaussian = [("smoothout", "gaussian", 0.025, True, 91.53), ("adasmoothout", "gaussian", 0.2, True, 92.44)]
    alone = [left, ("smoothout", "gaussian", 1.5e-4, False, 91.38)]
    table5 = [smooth, gaussian[0], ada, gaussian[1], *alone]
    assert of("table5", "resnet44") == table5
    assert of("table5", "c1") == [(*row[:-1], None) for row in table5]


def test_ablations_differ_from_their_row_in_what_they_ablate():
    left = next(row for row in EXPERIMENTS["table3"](Setting()).rows if "without" in row.label)
    there, here = left.versus.to_dict(), left.config.to_dict()
    assert {name for name in there if there[name] != here[name]} == {"denoise"}


def test_imagenet_is_ready_and_imagenette_stands_in_for_it():
    real = [r for r in EXPERIMENTS["table2"](Setting(imagenet="some/folder")).rows if "ImageNet" in r.label]
    assert len(real) == 7
    large = [row.config for row in real if row.config.batch_size != 256]
    assert {(c.dataset, c.batch_size, c.ghost_batch_size) for c in large} == {("imagefolder:some/folder", 16384, 128)}
    assert [row.accuracy for row in real] == [47.64, 52.53, 54.24, 55.51, 66.75, 67.11, 56.15]
    here = [row for row in EXPERIMENTS["table2"](Setting()).rows if "ImageNet" in row.label]
    assert all(row.config.dataset == "imagenette" and row.config.batch_size <= 2500 for row in here)
    assert all(row.note == PLUMBING and row.accuracy is None for row in here)


def test_rows_of_some_networks_only():
    (experiment,) = asked_for(["table1"], Setting(), ["f1"])
    assert {row.config.model for row in experiment.rows} == {"f1"}
    (figure,) = asked_for(["figure8"], Setting(), ["f1"])
    assert (figure.rows, figure.lines, figure.drawings) == ((), (), ())


def test_claims_of_any_preset_take_their_strengths_from_held_out_rows_of_ours_and_say_so():
    rows = [row for row in EXPERIMENTS["claims"](Setting("paper", "paper")).rows if row.config.hold_out]
    assert len(rows) == 12
    assert all("held-out images" in row.note for row in rows)
    candidates = {row.config for row in EXPERIMENTS["choice"](Setting("paper", "ours")).rows}
    assert {row.config for row in rows} <= candidates


def test_a_run_in_which_a_preset_changes_nothing_is_that_of_the_text(monkeypatch):
    settings = {preset: Setting("paper", preset) for preset in PRESETS}
    plain = {preset: configure(setting, RESNET44, 128, "plain") for preset, setting in settings.items()}
    assert plain["ours"] == plain["paper"]
    assert plain["authors"] == replace(plain["authors"], preset="authors", report="best")
    given = {"strength": 0.1, "strength_schedule": "linear", "draws": "ghost"}
    assert configure(settings["ours"], C1, 256, "smoothout", **given).preset == "paper"  # nothing of the preset is left
    monkeypatch.setitem(CHOSEN, ("c1", 256, "smoothout"), given)
    assert configure(settings["ours"], C1, 256, "smoothout").preset == "ours"
