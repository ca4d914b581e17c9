"""Run folders while they are written to: always whole, and by one process."""

import json
import os
import subprocess
import sys

import pytest
import torch

from smoothout.lab.config import resolve
from smoothout.lab.files import RunError
from smoothout.lab.run_folder import open_folder
from smoothout.lab.runs import CHECKPOINT, PREVIOUS, Provenance, load_run

CONFIG = resolve(epochs=3)


def begin(folder, config=CONFIG):
    folder.begin(config, Provenance.here(torch.device("cpu")))


def test_every_start_is_kept(tmp_path):
    with open_folder(tmp_path, CONFIG) as folder:
        for _ in range(2):
            begin(folder)
    assert len(json.loads((tmp_path / "provenance.json").read_text())["starts"]) == 2


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


def test_a_damaged_provenance_is_named_before_it_is_written(tmp_path):
    with open_folder(tmp_path, CONFIG) as folder:
        begin(folder)
        (tmp_path / "provenance.json").write_text("{}")
        with pytest.raises(RunError, match=r"provenance\.json: is not the provenance of a run"):
            begin(folder)


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
