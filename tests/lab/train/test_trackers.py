"""Event files beside a run, by a stand-in for TensorBoard's writer."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from smoothout.lab.config import resolve
from smoothout.lab.train.start import Options, train

TRACKED = Options(device="cpu", quiet=True, tensorboard=True)


@pytest.fixture
def scalars(monkeypatch):
    """What is written: (name, epoch)."""
    written = []

    class Writer:
        def __init__(self, folder, purge_step):
            Path(folder).mkdir()

        def add_scalar(self, name, value, epoch):
            written.append((name, epoch))

        def close(self):
            written.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    return written


def test_every_epoch_is_written(tmp_path, scalars):
    train(resolve(model="mlp", batch_size=500, epochs=2), tmp_path / "run", TRACKED)
    assert {("test_accuracy", 1), ("test_accuracy", 2), ("train_loss", 2)} <= set(scalars)
    assert scalars[-1] == "closed"


def test_a_run_that_could_not_be_made_leaves_its_folder_free(tmp_path, scalars):
    with pytest.raises(ValueError, match="mlp has no dropout"):
        train(resolve(model="mlp", batch_size=500, epochs=1, dropout=0.5), tmp_path / "run", TRACKED)
    train(resolve(model="mlp", batch_size=500, epochs=1), tmp_path / "run", TRACKED)
