"""Real processes, really killed: the same command again ends in the same bits as if nothing had happened."""

import os
import random
import signal
import time

import pytest
from command_line import run, start, wait_for_line
from sameness import assert_same_run

from in_process import smoothout
from smoothout.lab.config import resolve
from smoothout.lab.files import PARTIAL, RunError
from smoothout.lab.runs import CHECKPOINT
from smoothout.lab.train.start import Options, train

# Convolutions, BatchNorm, dropout, Adam, ghosts and a draw for each: everything that has a state.
SETTINGS = {
    "model": "c1",
    "method": "adasmoothout",
    "draws": "ghost",
    "batch_size": 256,
    "ghost_batch_size": 128,
    "lr": 1e-3,
    "strength_schedule": "linear",
    "log_smoothed_loss": True,
}
EPOCHS = 6


def flags(epochs, out):
    given = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items() if value is not True]
    return ["train", *given, "--log-smoothed-loss", f"--epochs={epochs}", "--out", out, "--device=cpu"]


def uninterrupted(epochs, out):
    train(resolve(**SETTINGS, epochs=epochs), out, Options(device="cpu", quiet=True))


def kill_during_a_checkpoint(process, out):
    """SIGKILL while a checkpoint is being written; gives whether its temporary file was left."""
    partial = out / (CHECKPOINT + PARTIAL)
    while process.poll() is None and not partial.exists():
        pass  # the write takes milliseconds: no time to sleep
    process.kill()
    process.wait()
    return partial.exists()


def test_sigint_sigterm_and_sigkill_lose_nothing(tmp_path):
    out = tmp_path / "killed"
    randomly = random.Random()
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with start(*flags(EPOCHS, out)) as process:
            wait_for_line(process, "epoch ")
            time.sleep(randomly.uniform(0, 0.3))
            if number == signal.SIGTERM:
                with pytest.raises(RunError, match=f"in use by process {process.pid}"):
                    uninterrupted(EPOCHS, out)
            process.send_signal(number)
            _, error = process.communicate()
        assert process.returncode == code, error
        assert f"({number.name}). The same command goes on from there." in error
        assert "Traceback" not in error
    with start(*flags(EPOCHS, out)) as process:
        kill_during_a_checkpoint(process, out)
        assert process.returncode == -signal.SIGKILL
    code, output, error = run(*flags(EPOCHS, out))
    assert code == 0, error
    assert "going on from epoch" in output
    uninterrupted(EPOCHS, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", out)
    done = smoothout(*flags(EPOCHS, out), cwd=tmp_path)
    assert done.returncode == 0
    assert f"{out} is done: test accuracy" in done.stdout


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_twenty_kills_of_which_five_tear_a_checkpoint(tmp_path):
    """Every process is killed: half of them at a random moment, half while they write a checkpoint."""
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    randomly = random.Random(seed)
    epochs, out = 600, tmp_path / "killed"  # more than twenty starts of a few seconds can finish
    kinds = {signal.SIGINT: 0, signal.SIGTERM: 0, signal.SIGKILL: 0}
    torn = kills = 0
    while kills < 20:
        with start(*flags(epochs, out)) as process:
            if kills % 2:
                torn += kill_during_a_checkpoint(process, out)
                kinds[signal.SIGKILL] += 1
            else:
                number = randomly.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
                # From before the first line on: imports, the first step, evaluation and writing are all hit.
                time.sleep(randomly.uniform(1.0, 6.0))
                process.send_signal(number)
                kinds[number] += 1
            process.communicate()
        assert process.returncode != 0, "it was done before it was killed: more epochs are needed"
        kills += 1
    assert torn >= 5
    print(f"{kinds}, {torn} with a torn checkpoint")
    code, _, error = run(*flags(epochs, out))
    assert code == 0, error
    uninterrupted(epochs, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", out)
