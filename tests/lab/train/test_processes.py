"""Two real processes under torchrun train as one does."""

import shutil
import socket
import sys

import pytest
import torch
from command_line import run, start

import gloo
from smoothout.lab.config import resolve
from smoothout.lab.files import RunError
from smoothout.lab.runs import load_run
from smoothout.lab.train.start import Options, train
from smoothout.lab.train.stop import Interrupted

# Without BatchNorm, with short last batches that divide unevenly; and with BatchNorm on ghosts of a rank's size.
CASES = {
    "no BatchNorm": {"model": "mlp", "method": "smoothout", "batch_size": 100, "epochs": 3, "hold_out": 400},
    "ghosts": {"model": "f1", "method": "adasmoothout", "batch_size": 256, "ghost_batch_size": 128, "epochs": 2,
               "hold_out": 157, "lr": 0.01},
    "SAM": {"model": "mlp", "method": "sam", "batch_size": 100, "epochs": 3, "hold_out": 400},
    "EMA": {"model": "f1", "method": "ema", "batch_size": 256, "ghost_batch_size": 128, "epochs": 2,
            "hold_out": 157, "lr": 0.01},
}  # fmt: skip


def flags(settings):
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def run_two_ranks(*arguments):
    """What torchrun starts, without torchrun, which takes as long to start as a rank."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = [start(*arguments, RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in range(2)]
    said = [rank.communicate() for rank in ranks]
    return max(abs(rank.returncode) for rank in ranks), *map("".join, zip(*said))


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_to_the_loss_curve_of_one(tmp_path, case):
    settings = CASES[case]
    config = resolve(**settings, shared_noise=True)
    train(config, tmp_path / "one", Options(device="cpu", quiet=True))
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
                "--rdzv-endpoint=localhost:0", "-m", "smoothout")  # fmt: skip
    arguments = ["train", *flags(settings), "--shared-noise", "--device=cpu", "--out", tmp_path / "two"]
    for _ in range(gloo.TRIES):
        code, output, error = run(*arguments, launcher=launcher) if case == "ghosts" else run_two_ranks(*arguments)
        if not gloo.aborted(error):
            break
        shutil.rmtree(tmp_path / "two", ignore_errors=True)  # what is done would not be trained again
    assert code == 0, error
    assert output.count("epoch 1/") == 1  # the first process alone speaks
    one, two = load_run(tmp_path / "one"), load_run(tmp_path / "two")
    assert two.record.provenance.processes == 2
    for alone, together in zip(one.metrics, two.metrics, strict=True):
        assert together.train_loss == pytest.approx(alone.train_loss, rel=1e-5)
        assert together.train_accuracy == pytest.approx(alone.train_accuracy, abs=0.003)
        assert together.updates == alone.updates
    weights = one.weights(), two.weights()
    for name in weights[0]:
        if "running" not in name and "num_batches" not in name:  # a rank's statistics move once a step, a loop's twice
            torch.testing.assert_close(weights[1][name], weights[0][name], rtol=1e-4, atol=1e-5)
    (tmp_path / "two" / "result.json").unlink()
    with pytest.raises(RunError, match="was written by 2 processes, here are 1"):
        train(config, tmp_path / "two", Options(device="cpu", quiet=True))


def test_what_stops_the_first_process_stops_the_other_in_one_message(tmp_path):
    settings = {"model": "mlp", "method": "plain", "batch_size": 500, "epochs": 2}
    with pytest.raises(Interrupted):
        train(resolve(**settings), tmp_path, Options(device="cpu", quiet=True, minutes=0))
    code, _, error = run_two_ranks("train", *flags(settings), "--device=cpu", "--out", tmp_path)
    assert code == 1
    assert error.splitlines() == [
        f"error: {tmp_path / 'checkpoint.pt'}: was written by 1 processes, here are 2: go on with as many"
    ]
