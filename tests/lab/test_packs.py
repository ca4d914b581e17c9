"""A pack gives back what the run folders held, weights apart."""

import json
import re

import pytest

from in_process import smoothout
from smoothout.lab import measurements, packs
from smoothout.lab.config import resolve
from smoothout.lab.files import RunError
from smoothout.lab.runs import find_runs, load_run
from smoothout.lab.train.start import Options, train
from smoothout.lab.trained import load_trained


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "runs" / "mlp" / "seed-0"
    train(resolve(dataset="digits", model="mlp", batch_size=128, epochs=2), path, Options(device="cpu", quiet=True))
    taken = measurements.take("sensitivity", load_trained(path, device="cpu"), strengths=(0.0, 0.1), draws=2)
    measurements.save(path, taken)
    return path


def test_there_and_back(run, tmp_path):
    text = packs.pack([run], tmp_path / "runs")
    assert len(text.splitlines()) == 1
    (tmp_path / "pack.jsonl").write_text(text)
    (again,) = packs.unpack(tmp_path / "pack.jsonl", tmp_path / "again")
    assert again == tmp_path / "again" / "mlp" / "seed-0"
    before, after = load_run(run), load_run(again)
    assert (before.config, before.metrics, before.record) == (after.config, after.metrics, after.record)
    assert measurements.load_all(run) == measurements.load_all(again)
    with pytest.raises(RunError, match=r"has no model.safetensors"):
        after.weights()


@pytest.mark.parametrize(
    "places",
    [
        "--out /somewhere/of/mine/run --data-root /somewhere/else",
        "--out=/somewhere/of/mine/run --data-root=/somewhere/else",
        "--out '/somewhere/of mine/run' '--data-root=/somewhere/else, or there'",
    ],
)
def test_no_absolute_place_is_kept(run, tmp_path, places):
    result = json.loads((run / "result.json").read_text())
    result["provenance"]["command"] = f"smoothout train {places} --epochs 2"
    (run / "result.json").write_text(json.dumps(result))
    text = packs.pack([run], tmp_path / "runs")
    assert "/somewhere" not in text
    assert "smoothout train --out mlp/seed-0 --data-root DATA-ROOT --epochs 2" in text


EMPTY = {"run": "a", "metrics": {}, "files": {}}


@pytest.mark.parametrize(
    "line", ['{"run": "a"}', '{"run": "a", "me', "null", "3", json.dumps({**EMPTY, "metrics": {"a": [1, 2], "b": [1]}})]
)
def test_a_damaged_pack_is_named(tmp_path, line):
    pack = tmp_path / "pack.jsonl"
    pack.write_text(f"{json.dumps(EMPTY)}\n{line}\n")
    with pytest.raises(RunError, match=r"pack\.jsonl, line 2: is not a packed run"):
        packs.unpack(pack, tmp_path)


def test_a_pack_that_is_no_text_is_named(tmp_path):
    (tmp_path / "pack.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(RunError, match=r"pack\.jsonl: is not a pack of runs"):
        packs.unpack(tmp_path / "pack.jsonl", tmp_path)


@pytest.mark.parametrize("outside", [{"run": "../a"}, {"files": {"../../a.json": 1}}, {"files": {"/tmp/a.json": 1}}])
def test_a_pack_writes_nothing_outside_its_folder(tmp_path, outside):
    (tmp_path / "pack.jsonl").write_text(json.dumps({**EMPTY, **outside}) + "\n")
    with pytest.raises(RunError, match=r"leaves the folder"):
        packs.unpack(tmp_path / "pack.jsonl", tmp_path / "into")


@pytest.mark.parametrize("name", ["provenance.json", "metrics.jsonl", "measurements/sensitivity-train.json"])
def test_a_damaged_file_of_a_run_is_named(run, tmp_path, name):
    (run / name).write_text('{"cut sho')
    with pytest.raises(RunError, match=re.escape(f"{run / name}: is not ")):
        packs.pack([run], tmp_path / "runs")


def test_two_trainings_of_a_run_both_come_back_and_faults_are_said_of_the_pack(run, tmp_path):
    pack = tmp_path / "pack.jsonl"
    pack.write_text(2 * packs.pack([run], tmp_path / "runs"))
    one, other = packs.unpack(pack, tmp_path / "again")
    assert one != other
    assert load_run(one).record == load_run(other).record
    with (
        pytest.raises(RunError, match=r"pack\.jsonl/mlp/seed-0/config\.json"),
        packs.named_by(pack, tmp_path / "again"),
    ):
        (one / "config.json").write_text("{}")
        load_run(one)


def test_a_report_adds_to_a_pack_and_keeps_what_diverged(tmp_path):
    usual = ("--model", "mlp", "--epochs", "1", "--batch-size", "400", "--device", "cpu", "--method", "plain")
    smoothout("train", *usual, "--out", "good", cwd=tmp_path)
    lost = smoothout("train", *usual, "--lr", "1e9", "--seeds", "2", "--out", "lost", cwd=tmp_path)
    assert [line.split(": the loss")[0] for line in lost.stderr.splitlines()] == ["error: lost/seed-0", "lost/seed-1"]
    for place in ("good", "lost", "good"):
        done = smoothout("report", "good", place, "--pack", "kept.jsonl", cwd=tmp_path)
        assert done.returncode == 0
    lines = (tmp_path / "kept.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert sum("failed.json" in json.loads(line)["files"] for line in lines) == 2
    page = smoothout("report", "kept.jsonl", "--markdown", cwd=tmp_path)
    assert "all 2 runs diverged" in page.stdout
    assert page.stderr == ""


def test_a_config_of_another_program_is_no_run(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    assert find_runs(tmp_path) == []
