"""What a page says of runs that were trained or measured otherwise than the others."""

import shutil
from dataclasses import replace

import pytest

from smoothout.lab import measurements
from smoothout.lab.config import resolve
from smoothout.lab.groups import Difference, Group, Sample, group_runs
from smoothout.lab.methods import METHODS
from smoothout.lab.report.measured import number
from smoothout.lab.report.names import name_of
from smoothout.lab.report.sections import _difference, _signed, figures_sections, table_sections
from smoothout.lab.runs import load_run
from smoothout.lab.train.start import Options, train
from smoothout.lab.trained import load_trained


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A plain run and a noisy one of another rate and with ghosts."""
    folder = tmp_path_factory.mktemp("trained")
    usual = {"model": "mlp", "epochs": 1, "batch_size": 400}
    for name, more in (("plain", {}), ("smoothout", {"lr": 0.3, "ghost_batch_size": 100})):
        train(resolve(method=name, **usual, **more), folder / name, Options(device="cpu", quiet=True))
    return folder


@pytest.fixture
def runs(trained, tmp_path):
    """Copies, so that each test measures its own."""
    return [shutil.copytree(trained / name, tmp_path / name) for name in ("plain", "smoothout")]


def _groups(*settings):
    return [Group(resolve(**each), ()) for each in settings]


def _names(groups):
    return [name_of(group, groups) for group in groups]


def _paragraphs(runs):
    return [text for section in table_sections(group_runs(map(load_run, runs))) for text in section.paragraphs]


def _measure(run, kind, **settings):
    measurements.save(run, measurements.take(kind, load_trained(run, device="cpu"), **settings))


# ---- trained otherwise -----------------------------------------------------------------------------------------------


def test_settings_of_training_that_differ_are_named_where_they_are_not_the_usual_ones():
    plain, noisy = {"method": "plain"}, {"method": "smoothout", "lr": 0.3, "ghost_batch_size": 32}
    assert _names(_groups(plain, noisy)) == [
        "batch 128: Baseline",
        "batch 128: SmoothOut, a = 0.0375, ghost_batch_size 32, lr 0.3",
    ]
    assert _names(_groups({**plain, "lr": 0.3, "ghost_batch_size": 32}, noisy)) == [
        "batch 128: Baseline",
        "batch 128: SmoothOut, a = 0.0375",
    ]
    assert _names(_groups({**plain, "hold_out": 5, "lr": 0.2}, {**plain, "hold_out": 9, "lr": 0.2})) == [
        "batch 128: Baseline, hold_out 5",
        "batch 128: Baseline, hold_out 9",
    ]


def test_what_goes_along_with_the_length_the_batch_or_the_preset_is_not_named():
    lengths = _groups({"model": "f1", "epochs": 50}, {"model": "f1", "epochs": 100})
    assert lengths[0].config.milestones != lengths[1].config.milestones
    assert not [name for name in _names(lengths) if "milestones" in name]
    batches = _groups(*({"model": "resnet44", "dataset": "cifar10", "batch_size": size} for size in (128, 2048)))
    assert batches[0].config.ghost_batch_size != batches[1].config.ghost_batch_size
    assert _names(batches) == ["batch 128: SmoothOut, a = 0.0375", "batch 2048: SmoothOut, a = 0.0375"]
    presets = _groups({"preset": "ours", "lr": 0.3}, {"preset": "authors"})
    assert _names(presets) == [
        "ours, batch 128: SmoothOut, a = 0.0375, lr 0.3",
        "authors, batch 128: SmoothOut, a = 0.0375",
    ]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_name_beside_another_rate(method):
    groups = _groups({"method": method}, {"method": method, "lr": 0.3})
    assert _names(groups)[1].endswith(", lr 0.3")


def test_a_method_without_a_baseline_says_in_what_the_plain_runs_differ(runs):
    results, against = table_sections(group_runs(map(load_run, runs)))
    assert [row.cells[0].text for row in results.table.rows] == [
        "batch 400: Baseline",
        "batch 400: SmoothOut, a = 0.0375, ghost_batch_size 100, lr 0.3",
    ]
    assert against.heading == "Against the baseline"
    assert against.table is None
    (line,) = against.paragraphs
    assert line == (
        "batch 400: SmoothOut, a = 0.0375, ghost_batch_size 100, lr 0.3: no baseline; the nearest plain runs differ in "
        "ghost_batch_size (0, here 100), lr (0.1, here 0.3)."
    )


def test_the_other_reasons_for_no_baseline(runs):
    plain, noisy = map(load_run, runs)
    alike = replace(plain, config=replace(noisy.config, method="plain", strength=0.0), record=None, failure="nan")
    (told,) = table_sections(group_runs([alike, noisy]))[1].paragraphs
    assert told.endswith("no baseline; every plain run diverged.")
    elsewhere = replace(plain, config=replace(plain.config, model="f1"))
    (told,) = table_sections(group_runs([elsewhere, noisy]))[1].paragraphs
    assert told.endswith("no baseline; there are no plain runs of mlp on digits.")
    two = replace(noisy.record, provenance=replace(noisy.record.provenance, processes=2))
    (told,) = table_sections(group_runs([plain, replace(noisy, record=two)]))[1].paragraphs
    assert told.endswith("lr (0.1, here 0.3), processes (1, here 2).")
    assert len(table_sections(group_runs([noisy]))) == 1  # where nothing plain is shown, nothing is missing


# ---- measured otherwise ----------------------------------------------------------------------------------------------


def test_why_there_is_no_loss_rise_is_said(runs):
    for run, strengths in zip(runs, ((0.0, 0.1), (0.0, 0.2)), strict=True):
        _measure(run, "sensitivity", strengths=strengths, draws=2)
    assert (
        "Loss rise under noise is left out: the runs were measured in different ways (strengths 0.0,0.1 and 0.0,0.2); "
        "`smoothout measure sensitivity RUNS` makes them alike."
    ) in _paragraphs(runs)
    for run in runs:
        _measure(run, "sensitivity", strengths=(0.1, 0.2), draws=2)
    assert [text for text in _paragraphs(runs) if "left out: it needs strength 0 and more; `smoothout" in text]
    for run in runs:
        _measure(run, "sensitivity", strengths=(0.0, 0.2), draws=2)
    assert not [text for text in _paragraphs(runs) if "left out" in text]


def test_a_row_that_is_not_wholly_measured_says_so_and_is_in_no_picture(runs):
    _measure(runs[0], "sensitivity", strengths=(0.0, 0.2), draws=2)
    assert [text for text in _paragraphs(runs) if "`smoothout measure sensitivity` has yet to measure all runs" in text]
    groups = group_runs(map(load_run, runs))
    pictures = len(figures_sections(groups)[0].figures)
    _measure(runs[1], "sensitivity", strengths=(0.0, 0.2), draws=2)
    assert not [text for text in _paragraphs(runs) if "has yet to measure" in text]
    assert len(figures_sections(groups)[0].figures) == pictures + 1


def test_an_interval_keeps_the_zeros_at_its_end():
    assert [_signed(x, 2) for x in (-0.43, -0.3, 0.04, 12.0, 3e-5)] == ["-0.43", "-0.30", "+0.040", "+12", "+3.0e-05"]


@pytest.mark.parametrize(
    ("points", "sign", "n", "diverged", "tone"),
    [
        (True, 1, 3, 0, "good"),
        (True, -1, 3, 0, "bad"),
        (False, 1, 3, 0, "bad"),
        (False, -1, 3, 0, "good"),
        (False, -1, 2, 0, "faint"),
        (True, 1, 3, 1, "faint"),
        (True, -1, 3, 1, "bad"),
        (False, 1, 3, 1, "bad"),
        (False, -1, 3, 1, "faint"),  # a lower loss of those that did not diverge
    ],
)
def test_more_accuracy_is_good_and_more_loss_is_bad(points, sign, n, diverged, tone):
    group = Group(resolve(method="smoothout"), (), diverged)
    found = Difference(sign * 0.3, sign * 0.3 - 0.1, sign * 0.3 + 0.1, n, paired=True)
    assert _difference(found, group, points).tone == tone


def test_sharpness_and_curvature_are_shown_where_all_runs_have_them_alike(runs):
    how = {"restarts": 1, "max_iterations": 1}
    _measure(runs[0], "sharpness", **how)
    _measure(runs[0], "curvature", probes=2, max_iterations=3)
    told = _paragraphs(runs)
    assert "Sharpness is left out: only 1 of 2 runs have it measured." in told
    assert "Top eigenvalue is left out: only 1 of 2 runs have it measured." in told
    _measure(runs[1], "sharpness", **how, epsilon=0.1)
    _measure(runs[1], "curvature", probes=2, max_iterations=3)
    told = _paragraphs(runs)
    assert "Sharpness is left out: the runs were measured in different ways (epsilon 0.0005 and 0.1)." in told
    _measure(runs[1], "sharpness", **how)
    table = table_sections(group_runs(map(load_run, runs)))[0].table
    for name, header in (("sharpness-train", "sharpness‡"), ("curvature-train", "top eigenvalue§")):
        column = table.header.index(header)
        for run, row in zip(runs, table.rows, strict=True):
            result = measurements.load(run, name).result
            value = result.value if name == "sharpness-train" else result.eigenvalues[0]
            assert float(row.cells[column].text.split()[0].replace(",", "")) == pytest.approx(value, rel=6e-3)
            assert row.cells[column].text.endswith(f"({int(result.converged)} of 1)")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((0.00020, 0.00026, 0.00030), "0.000253 ± 0.000050"),  # not 5e-05
        ((1.0, 3.5), "2.25 ± 1.77"),
        ((0.0091,), "0.0091"),
        ((0.0, 0.0), "0 ± 0"),
        ((1234.0, 1300.0), "1,267 ± 47"),
    ],
)
def test_a_deviation_has_the_places_of_its_mean(values, said):
    assert number(Sample(values)) == said
