"""Run folders: what is written, that it is written whole or not at all, and who may write."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from smoothout.lab.config import resolve
from smoothout.lab.experiments.records import look
from smoothout.lab.runs import (
    CHECKPOINT,
    PREVIOUS,
    EpochMetrics,
    Provenance,
    Record,
    RunError,
    find_runs,
    finished,
    load_run,
    open_folder,
    write_atomically,
)

CONFIG = resolve(epochs=3)


def epoch(number, accuracy=0.5):
    return EpochMetrics(number, number * 10, 1 / 3, 0.4, 0.1 + 0.2, accuracy, 0.1, 0.0375, number * 10.0, None, 1.5)


def begin(folder, config=CONFIG):
    folder.begin(config, Provenance.here(torch.device("cpu")))


HERE = Provenance.here(torch.device("cpu"))


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


def test_every_start_is_kept(tmp_path):
    with open_folder(tmp_path, CONFIG) as folder:
        for _ in range(2):
            begin(folder)
    assert len(json.loads((tmp_path / "provenance.json").read_text())["starts"]) == 2


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


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    file = tmp_path / "file"
    write_atomically(file, b"old")
    (tmp_path / "file.partial").mkdir()  # nothing can be opened under the temporary name
    with pytest.raises(RunError, match=r"file: cannot be written.*untouched\. .* the same command again\.$"):
        write_atomically(file, b"new")
    with pytest.raises(RunError, match=r"the same command again; it goes on\.$"):
        write_atomically(file, b"new", afterwards="it goes on")
    assert file.read_bytes() == b"old"


def test_there_is_always_a_checkpoint(tmp_path):
    with open_folder(tmp_path, CONFIG) as folder:
        begin(folder)
        for content in (b"first", b"second", b"third"):
            folder.write_checkpoint(content)
    assert (tmp_path / CHECKPOINT).read_bytes() == b"third"
    assert (tmp_path / PREVIOUS).read_bytes() == b"second"


def test_a_folder_in_which_no_run_began_goes_away_again(tmp_path):
    (tmp_path / "mine").mkdir()
    for out in (tmp_path / "runs" / "first", tmp_path / "mine", tmp_path / "mine" / "run"):
        with pytest.raises(ValueError, match="wrong"), open_folder(out, CONFIG):
            assert out.is_dir()
            raise ValueError("wrong")
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]  # which was there
    assert not (tmp_path / "mine" / "run").exists()
    with pytest.raises(ValueError, match="wrong"), open_folder(tmp_path / "begun", CONFIG) as folder:
        begin(folder)
        raise ValueError("wrong")
    assert load_run(tmp_path / "begun").config == CONFIG


def test_leftovers_of_a_killed_process_are_cleared(tmp_path):
    with open_folder(tmp_path, CONFIG) as folder:
        begin(folder)
        folder.write_checkpoint(b"whole")
    (tmp_path / f"{CHECKPOINT}.partial").write_bytes(b"hal")
    with open_folder(tmp_path, CONFIG):
        assert not (tmp_path / f"{CHECKPOINT}.partial").exists()
    assert (tmp_path / CHECKPOINT).read_bytes() == b"whole"


def test_another_configuration_is_refused_by_its_settings(tmp_path):
    with open_folder(tmp_path, CONFIG) as folder:
        begin(folder)
        folder.write_checkpoint(b"trained")
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(RunError, match="another configuration:\n  epochs: 3 there, 9 asked for\n"):
        with open_folder(tmp_path, resolve(epochs=9)):
            pass
    assert (tmp_path / "config.json").read_bytes() == before


def test_settings_of_a_run_that_trained_nothing_bind_nobody(tmp_path):
    """As after a batch that did not fit into memory."""
    with open_folder(tmp_path, CONFIG) as folder:
        begin(folder)
    (tmp_path / f"{CHECKPOINT}.partial").write_bytes(b"hal")  # killed in its first checkpoint
    other = resolve(epochs=9)
    with open_folder(tmp_path, other) as folder:
        begin(folder, other)
    assert load_run(tmp_path).config == other
    assert len(json.loads((tmp_path / "provenance.json").read_text())["starts"]) == 1


def test_a_folder_of_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("dear to somebody")
    with pytest.raises(RunError, match=r"holds no run \(thesis.tex is there\)"):
        with open_folder(tmp_path, CONFIG):
            pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_folders_place(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(RunError, match="cannot be used as a run folder"):
        with open_folder(tmp_path / "run", CONFIG):
            pass


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


def test_a_damaged_provenance_is_named_before_it_is_written(tmp_path):
    with open_folder(tmp_path, CONFIG) as folder:
        begin(folder)
        (tmp_path / "provenance.json").write_text("{}")
        with pytest.raises(RunError, match=r"provenance\.json: is not the provenance of a run"):
            begin(folder)


def test_a_damaged_failure_is_named(tmp_path):
    with open_folder(tmp_path, CONFIG) as folder:
        begin(folder)
    (tmp_path / "failed.json").write_text("{}")
    with pytest.raises(RunError, match=r"failed\.json: is not the failure of a run.*it has no 'message'"):
        look(tmp_path)


LOCK_HOLDER = """
import fcntl, sys
stream = open(sys.argv[1], "a+")
fcntl.lockf(stream, fcntl.LOCK_EX)
stream.write("process 12345\\n"); stream.flush()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_kept_out_until_the_first_is_gone(tmp_path):
    with open_folder(tmp_path, CONFIG):
        with pytest.raises(RunError, match=f"in use by process {os.getpid()}"):
            with open_folder(tmp_path, CONFIG):
                pass
    (tmp_path / "lock").write_text("")
    command = [sys.executable, "-c", LOCK_HOLDER, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunError, match="in use by process 12345"):
            with open_folder(tmp_path, CONFIG):
                pass
        other.kill()
    with open_folder(tmp_path, CONFIG) as folder:
        assert folder.path == tmp_path


OTHER_PROCESS = """
import fcntl, sys
fcntl.lockf(open(sys.argv[1], "a+"), fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


def test_a_refusal_in_the_same_process_leaves_the_lock_in_place(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with open_folder(tmp_path / "run", CONFIG):
        for name in ("run", "link"):
            with pytest.raises(RunError, match=f"in use by process {os.getpid()}"):
                with open_folder(tmp_path / name, CONFIG):
                    pass
        command = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path / "run" / "lock")]
        other = subprocess.run(command, capture_output=True, text=True)
        assert "BlockingIOError" in other.stderr


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
