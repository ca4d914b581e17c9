"""Pictures of training: means over seeds, epoch by epoch, of the runs there are."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from smoothout.lab.experiments import chosen
from smoothout.lab.experiments.figure8 import figure8
from smoothout.lab.experiments.measuring import sensitivity
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.table2 import resnet44, table2
from smoothout.lab.experiments.vocabulary import Curve, Drawing, Setting
from smoothout.lab.report import figures
from smoothout.lab.report.paper_figures import drawn, to_png
from smoothout.measure import plots

RESULTS = Path(__file__).parents[3] / "results"
METHODS = ("plain", "smoothout", "adasmoothout")


@pytest.fixture
def records(as_if_run):
    """Two seeds without noise, one with; none of AdaSmoothOut."""
    found = []
    for method, seed, accuracies in (("plain", 0, (0.5, 0.9)), ("plain", 1, (0.7, 0.92)), ("smoothout", 0, (0.6, 0.8))):
        one = as_if_run(resnet44(Setting(), method).with_seed(seed), accuracies[-1])
        epochs = tuple(
            replace(one.run.metrics[0], epoch=i, test_accuracy=accuracy, train_loss=1 - accuracy)
            for i, accuracy in enumerate(accuracies, 1)
        )
        found.append(replace(one, run=replace(one.run, metrics=epochs)))
    return Records(found)


@pytest.mark.parametrize(
    ("kind", "plain"), [("accuracy by epoch", [60.0, 91.0]), ("training loss by epoch", [0.4, 0.09])]
)
def test_epoch_by_epoch(records, kind, plain):
    curves = tuple(Curve(method, resnet44(Setting(), method)) for method in METHODS)
    draw = drawn(Drawing(kind, "", curves), records)
    axes = plots.new_axes()
    draw(axes)
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines) == ["plain (n = 2)", "smoothout (n = 1)"]
    assert list(lines["plain (n = 2)"].get_xdata()) == [1, 2]
    assert list(lines["plain (n = 2)"].get_ydata()) == pytest.approx(plain)
    assert to_png(draw).startswith(b"\x89PNG")
    assert drawn(Drawing(kind, "", curves[2:]), records) is None
    assert drawn(Drawing(kind, "", curves[1:]), records) is None  # SmoothOut's alone compares nothing
    assert drawn(Drawing(kind, "", curves[1:2]), records) is not None


def test_a_method_has_one_colour_in_all_pictures_of_an_experiment(tmp_path):
    """Of the kept runs, of which one picture shows training and the other measurements."""
    records = Records.read([], [RESULTS / "table2-authors.jsonl"], tmp_path)
    for drawing in table2(Setting("paper", "authors")).drawings:
        axes = plots.new_axes()
        drawn(drawing, records)(axes)
        colours = {line.get_label().split(" (")[0]: line.get_color() for line in axes.get_lines()}
        assert colours == {
            name: figures.COLOURS[method] for name, method in zip(("baseline", "SmoothOut", "AdaSmoothOut"), METHODS)
        }


def test_what_was_chosen_before_has_a_shade_of_its_own(monkeypatch):
    monkeypatch.setitem(chosen.CHOSEN, ("resnet44", 2048, "adasmoothout"), {"strength": 0.6})
    for drawing in table2(Setting("paper", "ours")).drawings:
        names = [curve.label for curve in drawing.curves]
        colours = dict(zip(names, figures.colours([curve.config for curve in drawing.curves])))
        assert names == ["baseline", "SmoothOut", "AdaSmoothOut", "AdaSmoothOut, as chosen before"]
        assert len(set(colours.values())) == 4
        assert colours["AdaSmoothOut"] == figures.COLOURS["adasmoothout"]


def test_loss_under_noise_is_the_mean_over_runs_and_says_of_how_many(tmp_path):
    setting = Setting("paper", "ours")
    records = Records.read([], [RESULTS / "table2-ours.jsonl"], tmp_path)
    axes = plots.new_axes()
    drawn(table2(setting).drawings[1], records)(axes)
    lines = {line.get_label(): line for line in axes.get_lines()}
    wanted = sensitivity(setting, "resnet44")
    curves = [run.answer(wanted) for run in records.seeds_of(resnet44(setting, "smoothout"))]
    assert len(curves) == 5
    assert lines["SmoothOut (n = 5)"].get_ydata() == pytest.approx(np.mean([each.losses for each in curves], axis=0))
    band = axes.collections[list(lines).index("SmoothOut (n = 5)")].get_paths()[0].vertices[:, 1]
    highest = np.mean([each.losses[-1] for each in curves]) + np.std([each.losses[-1] for each in curves], ddof=1)
    assert band.max() == pytest.approx(highest)


def test_loss_under_noise_of_one_run_is_that_runs(tmp_path):
    setting = Setting("paper", "paper")
    records = Records.read([], [RESULTS / "table2-paper.jsonl"], tmp_path)
    (baseline,) = records.seeds_of(resnet44(setting, "plain"))
    one_curve = replace(table2(setting).drawings[1], curves=table2(setting).drawings[1].curves[:1])
    axes = plots.new_axes()
    drawn(one_curve, records)(axes)
    (line,) = axes.get_lines()
    assert line.get_label() == "baseline (seed 0)"
    assert tuple(line.get_ydata()) == baseline.answer(sensitivity(setting, "resnet44")).losses


def test_a_line_between_minima_names_its_ends(tmp_path):
    records = Records.read([], [RESULTS / "table1-paper.jsonl"], tmp_path)
    axes = plots.new_axes()
    drawn(figure8(Setting("paper", "paper")).drawings[1], records)(axes)
    assert axes.get_xlabel() == "α   (0: baseline, 1: SmoothOut)"
