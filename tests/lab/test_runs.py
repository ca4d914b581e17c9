"""What is read back of a run: its record, metrics and weights, and which file is damaged."""

import json
import re

import pytest
import torch

from smoothout.lab.config import resolve
from smoothout.lab.experiments.records import look
from smoothout.lab.files import RunError
from smoothout.lab.run_folder import open_folder
from smoothout.lab.runs import EpochMetrics, Provenance, Record, find_runs, finished, load_run

CONFIG = resolve(epochs=3)
HERE = Provenance.here(torch.device("cpu"))


def epoch(number, accuracy=0.5):
    return EpochMetrics(number, number * 10, 1 / 3, 0.4, 0.1 + 0.2, accuracy, 0.1, 0.0375, number * 10.0, None, 1.5)


def begin(folder):
    folder.begin(CONFIG, HERE)


def record():
    return Record(CONFIG, epoch(3), epoch(2, 0.75), 10, 100, 20, "test", 1, 4.5, HERE)


def test_a_record_is_flat_and_comes_back_exactly(tmp_path):
    with open_folder(tmp_path / "run", CONFIG) as folder:
        begin(folder)
        folder.write_metrics([epoch(1), epoch(2)])
        folder.write_json("result.json", record().to_dict())
    run = load_run(tmp_path / "run")
    assert run.config == CONFIG
    assert run.record == record()
    assert run.metrics == (epoch(1), epoch(2))
    flat = json.loads((tmp_path / "run" / "result.json").read_text())
    for name in ("model", "dataset", "method", "strength", "preset", "batch_size", "seed"):
        assert flat[name] == getattr(CONFIG, name)
    assert flat["last"]["epoch"] == 3
    assert flat["best"]["epoch"] == 2
    assert flat["config_hash"] == CONFIG.hash


def test_the_reported_epoch_is_the_configurations_choice():
    values = record().to_dict()
    assert Record.from_dict(values).reported.epoch == 3
    assert Record.from_dict({**values, "report": "best"}).reported.epoch == 2


def test_provenance_says_where_and_how():
    here = Provenance.here(torch.device("cpu"), processes=2)
    assert (here.torch, here.processes, here.cuda) == (torch.__version__, 2, None)
    assert here.commit is None or len(here.commit.rstrip("+")) == 40
    assert here.command


def test_tied_and_strided_weights_are_saved(tmp_path):
    tied = torch.arange(6.0).view(2, 3)
    with open_folder(tmp_path, CONFIG) as folder:
        begin(folder)
        folder.write_weights("best.safetensors", {"a": tied, "b": tied, "c": tied.t()}, epoch=2)
    weights = load_run(tmp_path).weights("best")
    assert torch.equal(weights["b"], tied)
    assert torch.equal(weights["c"], tied.t())
    with pytest.raises(RunError, match=r"no model\.safetensors: training is not done"):
        load_run(tmp_path).weights("last")


def test_a_broken_configuration_file(tmp_path):
    (tmp_path / "config.json").write_text('{"settings": {"epochs"')
    with pytest.raises(RunError, match="is not the configuration of a run"):
        load_run(tmp_path)


DAMAGED = [
    ("result.json", "{}", "is not the record of a finished run, or is damaged (it has no 'last')"),
    ("result.json", '{"config_hash": "8', "is not the record of a finished run, or is damaged (Unterminated string"),
    ("metrics.jsonl", "{}", "is not one line of metrics an epoch, or is damaged (it has no 'epoch')"),
    ("metrics.jsonl", "[]", "is not one line of metrics an epoch, or is damaged"),
    ("metrics.jsonl", '{"epoch": 1, "upd', "is not one line of metrics an epoch, or is damaged (Unterminated string"),
    ("config.json", "{}", "is not the configuration of a run, or is damaged (it has no 'settings')"),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED)
def test_a_damaged_file_is_named(tmp_path, name, content, message):
    with open_folder(tmp_path, CONFIG) as folder:
        begin(folder)
    (tmp_path / name).write_text(content)
    with pytest.raises(RunError, match=re.escape(f"{tmp_path / name}: {message}")):
        load_run(tmp_path)


@pytest.mark.parametrize(("name", "which"), [("model.safetensors", "last"), ("best.safetensors", "best")])
def test_damaged_weights_are_named(tmp_path, name, which):
    with open_folder(tmp_path, CONFIG) as folder:
        begin(folder)
        folder.write_weights(name, {"a": torch.ones(3)}, epoch=2)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-4])
    with pytest.raises(RunError, match=re.escape(f"{tmp_path / name}: is not a file of weights, or is damaged")):
        load_run(tmp_path).weights(which)


def test_a_damaged_failure_is_named(tmp_path):
    with open_folder(tmp_path, CONFIG) as folder:
        begin(folder)
    (tmp_path / "failed.json").write_text("{}")
    with pytest.raises(RunError, match=r"failed\.json: is not the failure of a run.*it has no 'message'"):
        look(tmp_path)


def test_finished_runs_are_recognised_without_a_lock(tmp_path):
    assert finished(tmp_path, CONFIG) is None
    with open_folder(tmp_path, CONFIG) as folder:
        begin(folder)
        folder.write_json("result.json", record().to_dict())
        assert finished(tmp_path, CONFIG) == record()
        assert finished(tmp_path, resolve(epochs=9)) is None


def test_runs_are_found_below_a_folder(tmp_path):
    for name in ("seed-1", "seed-0"):
        with open_folder(tmp_path / "many" / name, CONFIG) as folder:
            begin(folder)
    assert [path.name for path in find_runs(tmp_path)] == ["seed-0", "seed-1"]
    with pytest.raises(RunError, match="is no run folder"):
        load_run(tmp_path)
