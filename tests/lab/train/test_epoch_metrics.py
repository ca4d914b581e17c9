"""What an epoch's line says, against a slow loop; last batches are short here."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from smoothout.lab.config import resolve
from smoothout.lab.run_folder import open_folder
from smoothout.lab.runs import Provenance, load_run
from smoothout.lab.train.build import build_model, judging_batches, load_dataset, training_batches
from smoothout.lab.train.checkpoint import read_newest
from smoothout.lab.train.evaluate import smoothed_loss
from smoothout.lab.train.loop import Surroundings, Trainer
from smoothout.lab.train.start import Options, train
from smoothout.lab.train.stop import Interrupted, StopRequest
from smoothout.lab.train.strength import strength_schedule
from smoothout.lab.train.turns import alone

QUIET = Options(device="cpu", quiet=True)
CPU = torch.device("cpu")
STEPS, IMAGES = 4, 400


def small(**settings):
    return resolve(**{"model": "mlp", "batch_size": 128, "hold_out": 1437 - IMAGES, "epochs": 2, **settings})


def test_losses_and_accuracies_are_means_over_images_and_the_rate_is_of_the_last_update(tmp_path):
    config = small(method="plain", lr=0.1, lr_warmup=1.5, momentum=0.9, weight_decay=1e-3)
    train(config, tmp_path, QUIET)
    dataset = load_dataset(config)
    torch.manual_seed(config.seed)
    model = build_model(config, dataset)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    for epoch, seen in enumerate(load_run(tmp_path).metrics):
        total, right, rate = 0.0, 0, 0.0
        for step, (images, labels) in enumerate(training_batches(config, dataset, CPU).epoch(epoch)):
            rate = 0.1 * min(1, (STEPS * epoch + step + 1) / (1.5 * STEPS))
            optimizer.param_groups[0]["lr"] = rate
            outputs = model(images)
            loss = F.cross_entropy(outputs, labels)
            total, right = total + len(labels) * loss.item(), right + int((outputs.argmax(1) == labels).sum())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        updates = STEPS * (epoch + 1)
        assert (seen.train_loss, seen.learning_rate) == pytest.approx((total / IMAGES, rate), rel=1e-6)
        assert (seen.train_accuracy, seen.strength) == (right / IMAGES, 0.0)
        assert (seen.epoch, seen.updates, seen.evaluations) == (epoch + 1, updates, updates)


def test_the_strength_is_of_the_last_update_and_the_smoothed_loss_is_at_it(tmp_path):
    config = small(method="smoothout", strength=0.2, strength_schedule="linear", draws=2, log_smoothed_loss=True)
    train(config, tmp_path, QUIET)
    run, schedule = load_run(tmp_path), strength_schedule("linear", 2 * STEPS)
    assert [each.strength for each in run.metrics] == pytest.approx([0.2 * schedule(3), 0.2 * schedule(7)])
    assert [each.evaluations for each in run.metrics] == [2 * STEPS, 4 * STEPS]
    dataset = load_dataset(config)
    model = build_model(config, dataset)
    model.load_state_dict(run.weights())
    found = smoothed_loss(config, model, judging_batches(config, dataset, CPU, split="train"), 0.2 * schedule(7), 1)
    assert run.metrics[-1].smoothed_loss == pytest.approx(found)


def test_the_best_weights_are_those_of_the_first_of_equal_epochs(tmp_path):
    config = small(method="plain", lr=1e-5, epochs=3)
    for stop_after in (0, 1):
        train(replace(config, stop_after=stop_after), tmp_path / str(stop_after), QUIET)
    run, first = (load_run(tmp_path / name) for name in "01")
    assert len({each.test_accuracy for each in run.metrics}) == 1
    assert run.record.best.epoch == 1
    for name, value in first.weights().items():
        assert torch.equal(run.weights("best")[name], value)
        assert not torch.equal(run.weights("last")[name], value)


@pytest.mark.parametrize("minutes", [None, 0.0], ids=["at once", "interrupted after every step"])
def test_seconds_are_those_of_training_and_none_of_between_its_parts(tmp_path, minutes):
    """By a clock that only updates move, and long waits between the parts."""
    config, time = small(method="plain"), [0.0]
    dataset, record = load_dataset(config), None

    def tick(*_):
        time[0] += 1

    with open_folder(tmp_path, config) as folder:
        while record is None:
            time[0] += 1000
            stop = StopRequest(minutes)
            trainer = Trainer(config, dataset, Surroundings(folder, stop=stop, clock=lambda: time[0]))
            trainer.optimizer.register_step_post_hook(tick)
            if found := read_newest(tmp_path, config.hash, world_size=1):
                trainer.load(found.state)
            with suppress(Interrupted):
                record = alone(trainer.run(Provenance.here(CPU)))
    assert [each.seconds for each in trainer.history] == [STEPS, STEPS]
    assert record.seconds == 2 * STEPS
