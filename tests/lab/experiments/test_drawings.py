"""Pictures of training: means over seeds, epoch by epoch, of the runs there are."""

from dataclasses import replace
from pathlib import Path

import pytest

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
    records = Records.read([], [RESULTS / "table2-ours.jsonl"], tmp_path)
    for drawing in table2(Setting("paper", "ours")).drawings:
        axes = plots.new_axes()
        drawn(drawing, records)(axes)
        colours = {line.get_label().split(" (")[0]: line.get_color() for line in axes.get_lines()}
        assert colours == {
            name: figures.COLOURS[method] for name, method in zip(("baseline", "SmoothOut", "AdaSmoothOut"), METHODS)
        }
