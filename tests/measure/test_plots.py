"""Plots are looked at by people; here: that they show what is in the results, and that matplotlib is optional."""

import subprocess
import sys

import pytest
import torch
from networks import accuracy, batches, cross_entropy, mlp, trained

from smoothout import measure
from smoothout.measure import Sharpness

pytest.importorskip("matplotlib")
from smoothout.measure import plots


@pytest.fixture(scope="module")
def networks():
    torch.manual_seed(0)
    data = batches()
    return {"one": trained(mlp(seed=1), data), "two": trained(mlp(seed=2), data)}, data


def shown(ax, path):
    """Draw it, which is when most mistakes come out; returns the labels in the legend."""
    ax.figure.savefig(path / "plot.png")
    assert (path / "plot.png").stat().st_size > 5000
    legend = ax.get_legend()
    return [] if legend is None else [text.get_text() for text in legend.get_texts()]


def test_sensitivity(networks, tmp_path):
    models, data = networks
    results = {n: measure.sensitivity(m, cross_entropy, data, [0, 0.1, 0.2], draws=3) for n, m in models.items()}
    ax = plots.plot_sensitivity(results, log=True)
    assert shown(ax, tmp_path) == ["one", "two"]
    assert [tuple(line.get_ydata()) for line in ax.lines] == [r.losses for r in results.values()]
    assert shown(results["one"].plot(), tmp_path) == []
    many = {f"run {i}": results["one"] for i in range(9)}
    ax = plots.plot_sensitivity(many)
    assert len(shown(ax, tmp_path)) == 9
    assert ax.get_legend().get_window_extent().y0 >= ax.get_window_extent().y1  # it would lie on the curves


@pytest.mark.parametrize(("length", "columns"), [(3, 3), (22, 2), (50, 1)])
def test_names_above_a_plot_fit_into_it(networks, tmp_path, length, columns):
    models, data = networks
    found = measure.landscape(models["one"], cross_entropy, data, steps=5)
    ax = plots.plot_landscape({(f"{i} " + "runs/some-network/" * 3)[:length]: found for i in range(3)})
    shown(ax, tmp_path)
    box = ax.get_legend().get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= ax.figure.bbox.x1
    assert box.y0 >= ax.bbox.y1 - 1
    assert ax.get_legend()._ncols == columns


def test_interpolation(networks, tmp_path):
    models, data = networks
    a, b = (m.state_dict() for m in models.values())
    with_accuracy = measure.interpolate(mlp(), a, b, cross_entropy, data, [-1, 0, 1, 2], accuracy_fn=accuracy)
    without = measure.interpolate(mlp(), a, b, cross_entropy, data, [-1, 0, 1, 2])
    assert shown(plots.plot_interpolation({"train": with_accuracy, "test": without}), tmp_path) == ["train", "test"]
    ax = without.plot()
    assert tuple(ax.lines[-1].get_ydata()) == without.losses
    assert len(ax.figure.axes) == 1
    assert len(with_accuracy.plot().figure.axes) == 2


def test_points_are_drawn_from_left_to_right_in_whatever_order_they_were_asked_for():
    line = measure.Interpolation((1.0, 0.0, 0.5), (3.0, 1.0, 2.0), (0.9, 0.7, 0.8))
    ax = line.plot()
    assert ax.lines[-1].get_xydata().tolist() == [[0.0, 1.0], [0.5, 2.0], [1.0, 3.0]]
    second = ax.figure.axes[1].lines[0]
    assert second.get_xdata().tolist() == [0.0, 0.5, 1.0]
    assert second.get_ydata().tolist() == pytest.approx([70.0, 80.0, 90.0])
    curve = measure.Sensitivity((0.2, 0.0, 0.1), (3.0, 1.0, 2.0), (0.3, 0.1, 0.2), None, 10.0, draws=2)
    ax = curve.plot()
    assert ax.lines[0].get_xydata().tolist() == [[0.0, 1.0], [0.1, 2.0], [0.2, 3.0]]
    edges = {(round(x, 6), round(y, 6)) for x, y in ax.collections[0].get_paths()[0].vertices}
    assert edges == {(0.0, 0.9), (0.0, 1.1), (0.1, 1.8), (0.1, 2.2), (0.2, 2.7), (0.2, 3.3)}


@pytest.mark.parametrize(("log", "scale", "bottom"), [(None, "log", 0.5), (False, "linear", 0.0)])
def test_losses_without_bound_beyond_the_ends_do_not_press_the_line_flat(log, scale, bottom):
    line = measure.Interpolation((-1.0, 0.0, 0.5, 1.0, 2.0), (5e5, 1.0, 2.0, 0.5, 5e5), None)
    ax = line.plot(log=log)
    assert ax.get_yscale() == scale
    assert ax.get_ylim()[1] == 200.0  # a hundred times the highest between the ends
    assert bottom - 0.3 < ax.get_ylim()[0] <= bottom
    near = measure.Interpolation((-1.0, 0.0, 1.0), (500.0, 1.0, 0.5), None)
    assert near.plot().get_yscale() == "linear"


def test_a_landscape_in_two_dimensions_has_its_first_direction_along_x():
    grid = measure.Landscape((-1.0, 0.0, 1.0), ((1.0, 1.0, 1.0), (10.0, 10.0, 10.0), (100.0, 100.0, 100.0)), None)
    ax = grid.plot(log=True)
    assert [axes.get_ylabel() for axes in ax.figure.axes] == ["second direction", "log₁₀ loss"]
    contours = [path.vertices for path in ax.collections[1].get_paths() if len(path.vertices)]
    assert len(contours) > 5
    for contour in contours:
        assert contour[:, 0] == pytest.approx(contour[0, 0])  # the loss changes along x only
        assert {contour[0, 1], contour[-1, 1]} == {-1.0, 1.0}


def test_landscape(networks, tmp_path):
    models, data = networks
    lines = {n: measure.landscape(m, cross_entropy, data, steps=5, directions=3) for n, m in models.items()}
    assert shown(plots.plot_landscape(lines), tmp_path) == ["one", "two"]
    grid = measure.landscape(models["one"], cross_entropy, data, dims=2, steps=5)
    shown(grid.plot(), tmp_path)
    shown(grid.plot(surface=True, log=True), tmp_path)
    assert plots.plot_landscape({"one": grid}).get_title() == "one"
    assert plots.plot_landscape(lines, log=True).get_yscale() == "log"
    with pytest.raises(ValueError, match="do not overlay"):
        plots.plot_landscape({"one": grid, "two": grid})


def test_sharpness_and_curvature(networks, tmp_path):
    models, data = networks
    results = {n: measure.sharpness(m, cross_entropy, data) for n, m in models.items()}
    nan = float("nan")
    results["three"] = Sharpness(nan, nan, (), 1.0, nan, "failed", "the loss is nan", 3)
    results["four"] = Sharpness(5.0, 5.0, (5.0,), 1.0, 1.1, "failed", "the loss is inf at a point of the box", 3)
    ax = plots.plot_sharpness(results)
    shown(ax, tmp_path)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["one", "two", "three", "four"]
    assert [t.get_text() for t in ax.texts][-2:] == ["failed", "failed\n5"]
    assert [tuple(line.get_ydata()) for line in ax.lines] == [result.trials for result in results.values()]
    heights = [0.0 if result.value != result.value else result.value for result in results.values()]
    assert [bar.get_height() for bar in ax.patches] == [label.xy[1] for label in ax.texts] == heights
    shown(results["one"].plot(), tmp_path)
    spectra = {n: measure.curvature(m, cross_entropy, data, top=3) for n, m in models.items()}
    legend = shown(plots.plot_curvature(spectra), tmp_path)
    assert legend[0].startswith("one, trace ")
    assert shown(spectra["one"].plot(), tmp_path)[0].startswith("trace ")


def test_suggested_strength(networks, tmp_path):
    models, data = networks
    found = measure.suggest_strength(models["one"], cross_entropy, data)
    assert shown(found.plot(), tmp_path)[1] == f"a = {found.strength:.3g}"


def test_given_axes_are_used(networks):
    models, data = networks
    curve = measure.sensitivity(models["one"], cross_entropy, data, [0, 0.1])
    ax = plots.new_axes()
    assert curve.plot(ax=ax) is ax


def test_matplotlib_and_scipy_are_imported_when_needed():
    code = (
        "import sys, smoothout\n"
        "assert not {'scipy', 'matplotlib'} & set(sys.modules)\n"
        "from smoothout.measure import plots\n"
        "assert 'matplotlib' not in sys.modules\n"
        "sys.modules['matplotlib'] = None\n"  # what Python makes of a package that is not there
        "try:\n"
        "    plots.new_axes()\n"
        "except ImportError as error:\n"
        "    assert \"pip install 'smoothout[lab]'\" in str(error)\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
