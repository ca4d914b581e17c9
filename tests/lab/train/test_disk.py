"""Disks that are full, read-only or have lost a part of a file: a clear error, and nothing lost."""

import subprocess

import pytest
import torch
from sameness import assert_same_run

from smoothout.lab.config import resolve
from smoothout.lab.files import RunError
from smoothout.lab.runs import CHECKPOINT, DAMAGED, PREVIOUS
from smoothout.lab.train.start import Options, train
from smoothout.lab.train.stop import Interrupted

QUIET = Options(device="cpu", quiet=True)


def config(**settings):
    return resolve(**{"model": "mlp", "batch_size": 400, "epochs": 3, **settings})


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def stop_after_first_step(config, out):
    with pytest.raises(Interrupted):
        train(config, out, Options(device="cpu", quiet=True, minutes=0))


def test_a_disk_too_small_for_the_first_checkpoint(small_disk):
    with pytest.raises(RunError, match=r"checkpoint\.pt: cannot be written, .* MB \(No space left on device\)"):
        train(config(model="f1"), small_disk / "run", QUIET)
    assert not list((small_disk / "run").glob("*.partial"))


def test_a_disk_that_fills_up_while_training(small_disk, tmp_path):
    out = small_disk / "run"
    stop_after_first_step(config(), out)
    before = (out / CHECKPOINT).read_bytes()
    (small_disk / "other people's data").write_bytes(bytes(1024 * 1024 - 190_000))
    with pytest.raises(
        RunError, match=r"\(No space left on device\).*the same command again; a training goes on from its last"
    ):
        train(config(), out, QUIET)
    assert before in ((out / name).read_bytes() for name in (CHECKPOINT, PREVIOUS) if (out / name).exists())
    (small_disk / "other people's data").unlink()
    train(config(), out, QUIET)
    train(config(), tmp_path / "whole", QUIET)
    assert_same_run(tmp_path / "whole", out)


def test_a_read_only_disk(small_disk, tmp_path):
    out = small_disk / "run"
    stop_after_first_step(config(), out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for place in (out, small_disk / "new"):
        with pytest.raises(RunError, match=r"cannot be used as a run folder.*Read-only file system"):
            train(config(), place, QUIET)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    record = train(config(), out, QUIET)
    train(config(), tmp_path / "whole", QUIET)
    assert_same_run(tmp_path / "whole", out)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert train(config(), out, QUIET) == record  # done, and says so without writing


def two_checkpoints(out):
    for _ in range(2):
        stop_after_first_step(config(), out)


@pytest.mark.parametrize("kept", [0, 1, 0.5, 0.99])
def test_a_checkpoint_cut_short_falls_back_to_the_one_before(tmp_path, capsys, kept):
    out = tmp_path / "run"
    two_checkpoints(out)
    whole = (out / CHECKPOINT).read_bytes()
    cut = whole[: int(kept * len(whole)) if kept < 1 else 1]
    (out / CHECKPOINT).write_bytes(cut)
    train(config(), out, Options(device="cpu"))
    said = capsys.readouterr().out
    assert f"{CHECKPOINT}: damaged, {len(cut)} bytes" in said
    assert f"going on from {PREVIOUS}, epoch 0, step 1" in said
    assert (out / DAMAGED).read_bytes() == cut
    train(config(), tmp_path / "whole", QUIET)
    assert_same_run(tmp_path / "whole", out)


def test_two_damaged_checkpoints_are_an_error_and_stay(tmp_path):
    out = tmp_path / "run"
    two_checkpoints(out)
    for name in (CHECKPOINT, PREVIOUS):
        (out / name).write_bytes((out / name).read_bytes()[:5000])
    with pytest.raises(RunError, match=rf"{CHECKPOINT}: damaged.*{PREVIOUS}: damaged.*no sound checkpoint"):
        train(config(), out, QUIET)
    assert [(out / name).stat().st_size for name in (CHECKPOINT, PREVIOUS)] == [5000, 5000]


def test_a_file_that_is_no_checkpoint(tmp_path):
    two_checkpoints(tmp_path)
    (tmp_path / PREVIOUS).unlink()
    torch.save({"format": 99}, tmp_path / CHECKPOINT)
    with pytest.raises(RunError, match="is no checkpoint of format 1"):
        train(config(), tmp_path, QUIET)


def test_a_checkpoint_of_another_run(tmp_path):
    two_checkpoints(tmp_path / "one")
    stop_after_first_step(config(seed=1), tmp_path / "other")
    (tmp_path / "one" / CHECKPOINT).write_bytes((tmp_path / "other" / CHECKPOINT).read_bytes())
    with pytest.raises(RunError, match=f"is of configuration {config(seed=1).hash}, this run is {config().hash}"):
        train(config(), tmp_path / "one", QUIET)


def test_a_folder_on_a_full_disk_is_named(small_disk):
    (small_disk / "run").mkdir()
    with pytest.raises(OSError, match="No space left"), (small_disk / "rest").open("wb") as rest:
        while True:
            rest.write(bytes(4096))
            rest.flush()
    with pytest.raises(RunError, match=r"run/.*No space left on device"):
        train(config(), small_disk / "run", QUIET)
