"""Event files of TensorBoard beside a run."""

import sys

import pytest

from smoothout.lab.config import resolve
from smoothout.lab.runs import load_run
from smoothout.lab.train.start import Options, train
from smoothout.lab.train.stop import Interrupted

events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs TensorBoard")
TRACKED = Options(device="cpu", quiet=True, tensorboard=True)
CONFIG = resolve(model="mlp", batch_size=500, epochs=3)


def test_every_epoch_is_there_as_in_the_record(tmp_path):
    train(CONFIG, tmp_path, TRACKED)
    written, run = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload(), load_run(tmp_path)
    for name in ("test_accuracy", "train_loss"):
        found = [(event.step, event.value) for event in written.Scalars(name)]
        assert found == [(each.epoch, pytest.approx(getattr(each, name))) for each in run.metrics]


def test_a_run_that_could_not_be_made_leaves_its_folder_free(tmp_path):
    with pytest.raises(ValueError, match="mlp has no dropout"):
        train(resolve(model="mlp", batch_size=500, epochs=1, dropout=0.5), tmp_path / "run", TRACKED)
    train(CONFIG, tmp_path / "run", TRACKED)


def test_a_run_stopped_before_its_first_epoch_ended_leaves_no_events(tmp_path):
    with pytest.raises(Interrupted):
        train(CONFIG, tmp_path, Options(device="cpu", quiet=True, tensorboard=True, minutes=0))
    assert not (tmp_path / "tensorboard").exists()


def test_it_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install 'smoothout\[tensorboard\]'"):
        train(CONFIG, tmp_path, TRACKED)
