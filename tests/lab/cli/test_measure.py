"""`smoothout measure` on real runs: what it prints, what it leaves in the run folder, what it refuses."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from in_process import smoothout
from smoothout import measure
from smoothout.lab import measurements
from smoothout.lab.config import resolve
from smoothout.lab.runs import load_run
from smoothout.lab.train.start import Options, train
from smoothout.lab.trained import load_trained, mean_loss


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two short runs on the digits."""
    folder = tmp_path_factory.mktemp("runs")
    for name, method in (("a", "plain"), ("b", "smoothout")):
        config = resolve(dataset="digits", model="mlp", method=method, batch_size=64, epochs=3)
        train(config, folder / name, Options(device="cpu", quiet=True))
    return folder


def measured(*arguments, cwd):
    return smoothout("measure", *arguments, "--device", "cpu", cwd=cwd)


COMMANDS = [
    ("sharpness", ["--restarts", "2", "--method", "ascent"], measure.Sharpness),
    ("sensitivity", ["--strengths", "0,0.05", "--draws", "2", "--split", "test"], measure.Sensitivity),
    ("landscape", ["--steps", "5", "--directions", "2", "--images", "100"], measure.Landscape),
    ("curvature", ["--probes", "3", "--max-iterations", "10"], measure.Curvature),
]


@pytest.mark.parametrize(("kind", "arguments", "result"), COMMANDS, ids=[c[0] for c in COMMANDS])
def test_each_kind_is_printed_kept_and_drawn(runs, kind, arguments, result):
    done = measured(kind, "a", "b", *arguments, "--plot", f"{kind}.svg", cwd=runs)
    assert done.returncode == 0, done.stderr
    assert (runs / f"{kind}.svg").stat().st_size > 1000
    name = f"{kind}-{'test' if kind == 'sensitivity' else 'train'}"
    for run in ("a", "b"):
        kept = measurements.load_all(runs / run)[name]
        assert isinstance(kept.result, result)
        assert kept.how["split"] == name.split("-")[1]
        assert kept.how["weights"] == "last"
        assert kept.how["images"] == {"landscape": 100, "sensitivity": 360}.get(kind, 1437)
        assert run in done.stdout


def test_interpolation_ends_at_the_two_runs(runs):
    done = measured("interpolate", "a", "b", "--alphas", "0:1:0.5", cwd=runs)
    assert done.returncode == 0, done.stderr
    (kept,) = [m for name, m in measurements.load_all(runs / "a").items() if name.startswith("interpolation")]
    for end, path in ((0, "a"), (-1, "b")):
        trained = load_trained(runs / path, device="cpu")
        with measure.model_loss_at(trained.model, mean_loss, trained.train) as at:
            assert kept.result.losses[end] == at.base_loss()


def test_without_a_terminal_each_run_is_a_line(runs):
    done = measured("sensitivity", "a", "b", "--strengths", "0,0.01", "--images", "50", cwd=runs)
    assert done.stderr.splitlines() == ["sensitivity of a, run 1 of 2", "sensitivity of b, run 2 of 2"]
    done = measured("sensitivity", "a", "--strengths", "0,0.01", "--images", "50", cwd=runs)
    assert done.stderr.splitlines() == ["sensitivity of a"]


def test_tables_say_what_their_numbers_are(runs):
    table = measured("sensitivity", "a", "--strengths", "0,0.01,0.05", "--images", "50", cwd=runs).stdout
    assert "loss at a = 0 " in table
    assert "loss at a = 0.05" in table
    table = measured("interpolate", "a", "b", "--alphas", "0:1:0.6", "--images", "50", cwd=runs).stdout.split()
    table = table[table.index("α") :]
    assert table[:3] == ["α", "loss", "accuracy"]
    assert table[3::3] == ["0.00", "0.60"]  # 1.20 would be beyond the end
    assert all(accuracy.endswith("%") for accuracy in table[5::3])


def test_one_strength_is_measured_against_none(runs):
    done = measured("sensitivity", "a", "--strengths", "0.1", "--draws", "1", "--images", "50", cwd=runs)
    said, header, row = done.stdout.splitlines()[-3:]
    assert said.startswith("a: replaces ") or said == "strengths: 0 is measured, too, beside 0.1"
    assert header.strip().split("  ")[-3:] == ["loss at a = 0", "loss at a = 0.1", "slope s"]
    assert "strengths: 0 is measured, too, beside 0.1\n" in done.stdout
    kept = measurements.load(runs / "a", "sensitivity-train").result
    assert kept.strengths == (0.0, 0.1)
    assert kept.slope == pytest.approx((kept.losses[1] - kept.losses[0]) / 0.1)
    assert row.split()[-1] == f"{kept.slope:.4g}"


def test_what_replaces_a_measurement_of_other_settings_says_so(runs, tmp_path):
    shutil.copytree(runs / "a", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "measurements", ignore_errors=True)
    command = ("sensitivity", "run", "--images", "50", "--draws")
    for strengths, draws, said in (
        ("0,0.01,0.02,0.03,0.04,0.05", 1, ""),
        ("0,0.01,0.02,0.03,0.04,0.05", 1, ""),
        ("0,0.1", 1, "run: replaces the sensitivity-train with strengths 0 … 0.05 (6)\n"),
        ("0,0.2", 2, "run: replaces the sensitivity-train with draws 1; strengths 0, 0.1\n"),
    ):
        done = measured(*command, draws, "--strengths", strengths, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout[: done.stdout.index(" run ")].strip() == said.strip()
    (tmp_path / "run" / "measurements" / "sensitivity-train.json").write_text("{}")
    assert measured(*command, 1, cwd=tmp_path).returncode == 0  # a damaged one is replaced


@pytest.mark.parametrize("dims", [1, 2])
def test_a_landscape_tells_how_high_its_edge_is(runs, dims):
    arguments = ("--dims", dims, "--steps", "3", "--span", "0.5", "--images", "50")
    table = measured("landscape", "b", *arguments, cwd=runs).stdout
    losses = measurements.load(runs / "b", "landscape-train").result.losses
    if dims == 1:
        edge = (losses[0] + losses[2]) / 2
        assert "mean loss at ±0.5" in table
    else:
        edge = (sum(map(sum, losses)) - losses[1][1]) / 8
        assert "mean loss on the edge, ±0.5" in table
    assert table.split()[-1] == f"{edge:.4g}"


def test_a_plot_that_cannot_be_drawn_is_refused_before_measuring(runs, tmp_path):
    (tmp_path / "runs").symlink_to(runs)
    for file, words in (("no/x.svg", "there is no folder 'no'"), ("x.foo", "ends in .svg, .png or .pdf")):
        refused = measured("curvature", "runs/a", "--plot", file, cwd=tmp_path)
        assert f"error: plot={file!r}: " in refused.stderr
        assert words in refused.stderr
        assert not refused.stdout
    refused = measured("landscape", "runs", "--dims", "2", "--plot", "x.svg", cwd=tmp_path)
    assert "error: 2-D landscapes do not overlay" in refused.stderr
    assert not refused.stdout


def test_the_report_shows_what_was_measured(runs):
    done = measured("sensitivity", ".", "--strengths", "0,0.1", "--draws", "2", cwd=runs)
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "smoothout", "report", ".", "--markdown"]  # a process that measured nothing
    text = subprocess.run(command, cwd=runs, capture_output=True, text=True, check=True).stdout
    assert "loss rise under noise" in text


def test_what_it_refuses(runs, tmp_path):
    assert "no finished run in nothing" in measured("sharpness", "nothing", cwd=tmp_path).stderr
    assert "strengths='0': give one above 0" in measured("sensitivity", "a", "--strengths", "0", cwd=runs).stderr
    assert "strengths='0;1'" in measured("sensitivity", "a", "--strengths", "0;1", cwd=runs).stderr
    for alphas in ("0:1", "0:1:0", "1:0:-1", "0:inf:1"):
        assert f"error: alphas={alphas!r}" in measured("interpolate", "a", "b", "--alphas", alphas, cwd=runs).stderr
    config = json.loads((runs / "a" / "config.json").read_text())
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "config.json").write_text(json.dumps(config))
    assert "no finished run" in measured("sharpness", "unfinished", cwd=tmp_path).stderr


def test_a_device_that_is_neither_cpu_nor_cuda(runs):
    refused = smoothout("measure", "sharpness", "a", "--device", "mps", cwd=runs)
    assert (refused.returncode, refused.stderr) == (1, "error: device='mps': expected auto, cpu, cuda or cuda:1\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"cut short", "model.safetensors: is not a file of weights, or is damaged"),
        (safetensors.torch.save({"a": torch.ones(2)}), "its weights are not those of its network, mlp"),
    ],
    ids=["damaged", "of another network"],
)
def test_weights_that_cannot_be_used(runs, tmp_path, content, message):
    shutil.copytree(runs / "a", tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").write_bytes(content)
    refused = measured("curvature", "run", cwd=tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: run")
    assert message in refused.stderr


@pytest.mark.parametrize("content", ["{}", '{"name": "sharp', '{"result": {"kind": "Softness"}}'])
def test_a_damaged_measurement_is_named(runs, tmp_path, content):
    shutil.copytree(runs / "a", tmp_path / "run")
    file = tmp_path / "run" / "measurements" / "sensitivity-train.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    refused = smoothout("report", "run", cwd=tmp_path)
    assert refused.returncode == 1
    assert f"error: {file.relative_to(tmp_path)}: is not a measurement, or is damaged" in refused.stderr


def test_weights_that_were_removed_come_back(runs, tmp_path):
    shutil.copytree(runs / "a", tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    refused = measured("curvature", "run", cwd=tmp_path)
    assert "has no model.safetensors: it was removed. Remove result.json, too, and run its command" in refused.stderr
    (tmp_path / "run" / "result.json").unlink()
    train(load_run(tmp_path / "run").config, tmp_path / "run", Options(device="cpu", quiet=True))
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (runs / "a" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("command", [("sharpness", "a"), ("sharpness", "a", "b"), ("interpolate", "b", "a")])
def test_a_run_that_cannot_be_written_is_refused_before_measuring(runs, monkeypatch, command):
    kept_with = runs / (command[1] if command[0] == "interpolate" else command[-1])

    def access(path, mode):
        return mode != os.W_OK or kept_with not in (runs / path, (runs / path).parent)

    monkeypatch.setattr(os, "access", access)
    for name in ("take", "take_interpolation"):
        monkeypatch.setattr(measurements, name, lambda *a, **how: pytest.fail("it was measured"))
    refused = measured(*command, cwd=runs)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"error: {kept_with.name}")
    assert "cannot be written, and results are kept there" in refused.stderr
