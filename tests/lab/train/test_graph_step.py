"""Training by CUDA graphs is training by the plain loop. On a machine with a CUDA device."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from smoothout.lab.config import resolve
from smoothout.lab.runs import load_run
from smoothout.lab.train.ghost_step import Batch, GhostStep
from smoothout.lab.train.graph_step import GraphStep
from smoothout.lab.train.start import Options, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = {
    "plain, Adam": {"model": "c1", "method": "plain", "dropout": 0.0},
    "one draw, bf16": {"model": "mlp", "amp": "bf16"},
    "a draw a ghost, clipped": {"model": "f1", "draws": "ghost", "ghost_batch_size": 64, "clip": 1.0, "lr": 0.01},
    "three draws, fp16": {"model": "mlp", "method": "adasmoothout", "draws": 3, "amp": "fp16"},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
def test_graphs_train_as_the_plain_loop_does(tmp_path, settings):
    config = resolve(**{"batch_size": 128, "epochs": 2, **settings})
    quiet = Options(device="cuda", quiet=True)
    train(config, tmp_path / "graphs", quiet)
    train(config, tmp_path / "plain", replace(quiet, cuda_graphs=False))
    for graphs, plain in zip(load_run(tmp_path / "graphs").metrics, load_run(tmp_path / "plain").metrics):
        # Sums in another order: what differs grows with training.
        assert graphs.train_loss == pytest.approx(plain.train_loss, rel=2e-3 * graphs.epoch)
        assert graphs.test_loss == pytest.approx(plain.test_loss, rel=2e-2)


def step_of(kind, model):
    return kind(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_dropout_masks_differ_from_replay_to_replay():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 3)).cuda()
    step = step_of(GraphStep, model)
    batch = Batch(torch.ones(8, 64, device="cuda"), torch.zeros(8, dtype=torch.int64, device="cuda"), 8)
    losses = {float(step.backward(batch).loss) for _ in range(8)}
    assert len(step._graphs) == 1
    assert len(losses) == 8


class WaitsForTheDevice(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1.0 + 0.0 * float(x.sum()))


def test_a_model_that_waits_is_trained_without_graphs_and_that_is_said():
    model = WaitsForTheDevice(4, 3).cuda()
    step = step_of(GraphStep, model)
    batch = Batch(torch.ones(8, 4, device="cuda"), torch.zeros(8, dtype=torch.int64, device="cuda"), 8)
    step.backward(batch)
    with pytest.warns(UserWarning, match="trained without CUDA graphs"):
        step.backward(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step.backward(batch)
    assert not step._graphs
    found = model.weight.grad / 5
    model.zero_grad()
    plain = step_of(GhostStep, model)
    plain.backward(batch)
    torch.testing.assert_close(found, model.weight.grad)
