"""Training in this process: metrics, interruption at every step, several seeds, loss that is not finite."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from sameness import assert_same_run, without_times

from smoothout import update_bn
from smoothout.lab.config import ConfigError, resolve
from smoothout.lab.data import Batches, load
from smoothout.lab.files import RunError
from smoothout.lab.runs import load_run
from smoothout.lab.train import loop
from smoothout.lab.train.build import build_model, judging_batches, load_dataset, training_batches
from smoothout.lab.train.evaluate import evaluate, smoothed_loss
from smoothout.lab.train.start import Options, seed_folder, train, train_seeds
from smoothout.lab.train.stop import Interrupted

QUIET = Options(device="cpu", quiet=True)
ONE_STEP = Options(device="cpu", quiet=True, minutes=0)  # the time budget is spent after every step


@pytest.fixture(autouse=True)
def own_models(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)  # `module:function` is looked for in the current folder


def small(**settings):
    """Four steps an epoch, the last one short."""
    return resolve(**{"model": "mlp", "batch_size": 128, "hold_out": 1437 - 400, "epochs": 2, **settings})


def test_digits_are_learnt(tmp_path):
    record = train(resolve(model="mlp", epochs=10, batch_size=64), tmp_path, QUIET)
    assert record.last.test_accuracy > 0.93
    assert record.last.train_loss < 0.3
    assert record.last.evaluations == record.last.updates == 10 * 23
    assert record.best.test_accuracy == max(each.test_accuracy for each in load_run(tmp_path).metrics)


def test_metrics_are_of_clean_weights_in_evaluation_mode(tmp_path):
    config = small(model="f1", method="adasmoothout", epochs=1)
    record = train(config, tmp_path, QUIET)
    dataset = load_dataset(config)
    model = build_model(config, dataset)
    model.load_state_dict(load_run(tmp_path).weights())
    found = evaluate(model, judging_batches(config, dataset, torch.device("cpu")))
    assert (found.loss, found.accuracy) == (record.last.test_loss, record.last.test_accuracy)


def test_a_network_is_judged_in_the_precision_of_training(tmp_path):
    how = {"model": "f1", "amp": "bf16", "epochs": 1}
    usual, anew = (train(small(**how, remeasure_bn=when), tmp_path / when, QUIET) for when in ("no", "clean"))
    dataset = load_dataset(usual.config)
    model = build_model(usual.config, dataset)
    model.load_state_dict(load_run(tmp_path / "no").weights())
    batches = judging_batches(usual.config, dataset, torch.device("cpu"))
    found = evaluate(model, batches, precision=torch.autocast("cpu", dtype=torch.bfloat16))
    assert usual.last.test_loss == anew.as_trained["test_loss"] == found.loss != evaluate(model, batches).loss


def test_what_judges_quickly_does_not_judge_the_last_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "quick_network", lambda config, model: lambda images: torch.zeros(len(images), 10))
    train(small(epochs=3), tmp_path / "quick", QUIET)
    monkeypatch.undo()
    train(small(epochs=3), tmp_path / "usual", QUIET)
    quick, usual = ([each.test_loss for each in load_run(tmp_path / name).metrics] for name in ("quick", "usual"))
    assert quick[:2] == [pytest.approx(math.log(10))] * 2
    assert quick[2] == usual[2]


def test_statistics_are_measured_anew_at_the_clean_weights_and_nothing_else_changes(tmp_path):
    """The last epoch is judged both ways, so a run tells what it changes."""
    settings = {"model": "f1", "strength": 0.1, "epochs": 3}
    usual, record = (train(small(**settings, remeasure_bn=how), tmp_path / how, QUIET) for how in ("no", "clean"))
    assert usual.as_trained is None
    assert record.as_trained == {"test_loss": usual.last.test_loss, "test_accuracy": usual.last.test_accuracy}
    assert record.last.test_loss != usual.last.test_loss
    runs = [load_run(tmp_path / how) for how in ("no", "clean")]
    earlier = [[each.test_loss for each in run.metrics[:-1]] for run in runs]
    assert earlier[0] == earlier[1]

    config, dataset = record.config, load_dataset(record.config)
    model = build_model(config, dataset)
    model.load_state_dict(runs[0].weights())
    images = torch.cat([batch for batch, _ in judging_batches(config, dataset, torch.device("cpu"), split="train")])
    update_bn(model, [images])  # few enough for one batch
    for name, value in runs[1].weights().items():
        torch.testing.assert_close(value, model.state_dict()[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("how", ["clean", "uncut"])
def test_statistics_are_those_of_images_as_training_cuts_them_or_uncut(tmp_path, monkeypatch, how):
    monkeypatch.setattr("smoothout.lab.train.build.EVALUATION_BATCH", 100)
    config = small(model="f1", strength=0.1, augment="pad-crop-flip")
    train(config, tmp_path / "usual", QUIET)
    train(replace(config, remeasure_bn=how), tmp_path / how, QUIET)

    dataset = load_dataset(config)
    model = build_model(config, dataset)
    model.load_state_dict(load_run(tmp_path / "usual").weights())
    augment = "none" if how == "uncut" else "pad-crop-flip"
    update_bn(model, Batches(dataset.train, 100, shuffle=True, augment=augment))
    for name, value in load_run(tmp_path / how).weights().items():
        torch.testing.assert_close(value, model.state_dict()[name], msg=lambda m, n=name: f"{n}: {m}")


def test_statistics_of_ghost_layers_are_measured_anew_too(tmp_path):
    config = small(model="f1", strength=0.1, ghost_batch_size=32, ghost_by="layer", remeasure_bn="clean")
    record = train(config, tmp_path, QUIET)
    assert record.as_trained is not None
    assert record.as_trained["test_loss"] != record.last.test_loss


def test_statistics_that_are_not_there_are_not_measured(tmp_path):
    assert train(small(remeasure_bn="clean"), tmp_path, QUIET).as_trained is None
    with pytest.raises(ConfigError, match="measures its average's statistics anew anyway"):
        small(method="swa", remeasure_bn="clean")


@pytest.mark.parametrize("settings", [{"remeasure_bn": "clean"}, {"method": "ema"}])
def test_statistics_are_those_of_images_in_any_order(tmp_path, monkeypatch, settings):
    """A folder of images is read class by class."""
    seen = []
    monkeypatch.setattr("smoothout.lab.train.statistics.update_bn", lambda model, batches: seen.extend(batches))
    monkeypatch.setattr("smoothout.lab.train.build.EVALUATION_BATCH", 100)
    config = small(model="f1", epochs=1, **settings)
    train(config, tmp_path, QUIET)
    in_order = list(judging_batches(config, load_dataset(config), torch.device("cpu"), split="train"))
    half = len(seen) if settings.get("remeasure_bn") else len(seen) // 2  # an average is measured again for the file
    assert half == len(in_order) == 4
    assert not torch.equal(seen[0][1], in_order[0][1])
    assert torch.equal(torch.cat([y for _, y in seen[:half]]).sort()[0], torch.cat([y for _, y in in_order]).sort()[0])


CASES = {
    "plain": {"method": "plain", "clip": 1.0},
    "statistics measured anew": {"model": "f1", "remeasure_bn": "clean"},
    "one draw": {"strength_schedule": "linear"},
    "a draw a ghost, Adam": {"draws": "ghost", "ghost_batch_size": 32, "optimizer": "adam", "lr": 1e-3},
    "three draws, AdamW": {"draws": 3, "optimizer": "adamw", "lr": 1e-3, "log_smoothed_loss": True},
    "filters, BatchNorm, no denoising": {"model": "f1", "method": "adasmoothout", "denoise": False, "strength": 0.01},
    "dropout": {"model": "odd_models:with_dropout", "reset_optimizer_every_epoch": True},
    "fp16": {"amp": "fp16", "ghost_batch_size": 64},
    "ghost layers": {"model": "f1", "ghost_batch_size": 32, "ghost_by": "layer", "lr_warmup": 1, "batch_size": 200},
    "SAM, BatchNorm": {"model": "f1", "method": "sam", "optimizer": "adam", "lr": 1e-3, "clip": 1.0},
    "ASAM, fp16, ghosts": {"method": "asam", "amp": "fp16", "ghost_batch_size": 64},
    "SWA, BatchNorm": {"model": "f1", "method": "swa", "swa_start": 0.0},
    "SWA, dropout": {"model": "odd_models:with_dropout", "method": "swa", "epochs": 3},
    "EMA, ghost layers": {"model": "f1", "method": "ema", "ghost_batch_size": 32, "ghost_by": "layer"},
    "stopped early": {
        "model": "f1",
        "epochs": 5,
        "stop_after": 2,
        "remeasure_bn": "clean",
        "strength_schedule": "linear",
    },
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
def test_interrupted_after_every_step_and_bit_equal_all_the_same(tmp_path, settings):
    config = small(**{"hold_out": 1437 - 300, **settings})  # three steps an epoch
    train(config, tmp_path / "whole", QUIET)
    interruptions = 0
    while interruptions < 100:
        try:
            train(config, tmp_path / "pieces", ONE_STEP)
            break
        except Interrupted:
            interruptions += 1
    steps = len(training_batches(config, load_dataset(config), torch.device("cpu")))
    assert interruptions == config.epochs_trained * steps - 1
    assert_same_run(tmp_path / "whole", tmp_path / "pieces")


def test_the_gradient_scaler_remembers_its_steps(tmp_path):
    config = small(amp="fp16")
    for _ in range(5):
        with pytest.raises(Interrupted):
            train(config, tmp_path, ONE_STEP)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["scaler"]["_growth_tracker"] == 5


def test_the_same_command_twice_gives_the_same_bits(tmp_path):
    for name in ("one", "other"):
        train(small(), tmp_path / name, QUIET)
    assert_same_run(tmp_path / "one", tmp_path / "other")


def test_a_run_that_stops_early_is_the_beginning_of_the_whole_one(tmp_path):
    config = small(model="f1", epochs=4, milestones=(1,), lr_warmup=3, strength_schedule="linear", remeasure_bn="clean")
    records = {n: train(replace(config, stop_after=n), tmp_path / str(n), QUIET) for n in (0, 2)}
    whole, cut = (without_times(load_run(tmp_path / str(n)).metrics) for n in (0, 2))
    assert len(cut) == records[2].last.epoch == 2
    with safe_open(tmp_path / "2" / "model.safetensors", "pt") as weights:
        assert weights.metadata()["epoch"] == "2"
    assert cut[0] == whole[0]
    # Its last epoch is judged with statistics measured anew, as the last of any run is.
    trained = ("epoch", "updates", "train_loss", "train_accuracy", "learning_rate", "strength")
    assert [getattr(cut[1], name) for name in trained] == [getattr(whole[1], name) for name in trained]
    assert records[2].as_trained["test_loss"] == whole[1].test_loss != cut[1].test_loss
    assert train(replace(config, stop_after=2), tmp_path / "2", QUIET) == records[2]  # done is done


def test_a_seed_sets_initialisation_order_and_noise():
    config = small()
    dataset = load_dataset(config)
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(build_model(config, dataset)[1].weight)
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])
    cpu = torch.device("cpu")
    orders = [next(training_batches(config.with_seed(seed), dataset, cpu).epoch(0))[1] for seed in (0, 1)]
    assert not torch.equal(*orders)


def test_seeds_differ_and_each_is_its_solo_run(tmp_path):
    configs = [small().with_seed(seed) for seed in (0, 1)]
    train_seeds(configs, lambda config: seed_folder(tmp_path, config), QUIET)
    train(configs[1], tmp_path / "solo", QUIET)
    assert_same_run(tmp_path / "seed-1", tmp_path / "solo")
    first, second = (load_run(tmp_path / f"seed-{seed}").record for seed in (0, 1))
    assert first.last.train_loss != second.last.train_loss


def test_done_is_done(tmp_path):
    record = train(small(), tmp_path, QUIET)
    times = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert train(small(), tmp_path, QUIET) == record
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == times


def test_a_run_that_was_killed_between_its_last_checkpoint_and_its_record(tmp_path):
    config = small(model="f1", remeasure_bn="clean")
    train(config, tmp_path / "whole", QUIET)
    train(config, tmp_path / "killed", QUIET)
    for name in ("result.json", "model.safetensors", "best.safetensors", "metrics.jsonl"):
        (tmp_path / "killed" / name).unlink()
    train(config, tmp_path / "killed", QUIET)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_the_checkpoint_loads_with_weights_only(tmp_path):
    train(small(optimizer="adam"), tmp_path, QUIET)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["position"]["epoch"] == 2
    assert json.loads(state["history"])[-1]["epoch"] == 2


def test_last_and_best_are_never_confused(tmp_path):
    # A rate that ruins the network in the end: the best epoch is not the last.
    config = small(epochs=6, lr=0.1, milestones="3", lr_decay=300.0, clip=1.0, method="plain")
    record = train(config, tmp_path, QUIET)
    assert record.best.epoch < record.last.epoch
    assert record.best.test_accuracy > record.last.test_accuracy
    dataset, run = load_dataset(config), load_run(tmp_path)
    for which, expected in (("last", record.last), ("best", record.best)):
        model = build_model(config, dataset)
        model.load_state_dict(run.weights(which))
        found = evaluate(model, judging_batches(config, dataset, torch.device("cpu")))
        assert found.accuracy == expected.test_accuracy


def test_rare_checkpoints_give_the_same_run(tmp_path):
    rare = Options(device="cpu", quiet=True, checkpoint_every=3)
    train(small(epochs=4), tmp_path / "each", QUIET)
    train(small(epochs=4), tmp_path / "rare", rare)
    assert_same_run(tmp_path / "each", tmp_path / "rare")
    assert torch.load(tmp_path / "rare" / "checkpoint.previous.pt", weights_only=True)["position"]["epoch"] == 3


def test_a_nan_loss_names_the_step_and_keeps_the_last_good_checkpoint(tmp_path):
    config = small(model="odd_models:nan_loss_in_call_9", epochs=5, method="plain")  # four calls an epoch
    message = r"loss is nan in step 1 of epoch 3 \(update 9\); the last finite loss was [\d.]+.*after epoch 2, is kept"
    for _ in range(2):  # the second time from the checkpoint
        with pytest.raises(RunError, match=message):
            train(config, tmp_path, QUIET)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["position"]["epoch"] == 2
    assert torch.isfinite(state["model"]["linear.weight"]).all()
    assert [each.epoch for each in load_run(tmp_path).metrics] == [1, 2]


def test_a_nan_loss_at_once(tmp_path):
    config = small(model="odd_models:nan_loss_in_call_1", method="plain")
    with pytest.raises(RunError, match=r"\(update 1\); the last finite loss was none\. No checkpoint had been made"):
        train(config, tmp_path, QUIET)


def test_weights_that_a_finite_loss_ruined_are_not_saved_as_good(tmp_path):
    config = small(model="odd_models:nan_gradient_in_call_8", method="plain", epochs=3)  # the last step of epoch 2
    with pytest.raises(RunError, match=r"linear\.weight is not finite after update 8.*after epoch 1, is kept"):
        train(config, tmp_path, QUIET)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["position"]["epoch"] == 1


def test_ghosts_by_loop_and_by_layer_train_alike(tmp_path):
    runs = []
    for way in ("loop", "layer"):
        config = small(model="f1", ghost_batch_size=32, ghost_by=way, method="plain", lr=0.01)
        train(config, tmp_path / way, QUIET)
        runs.append(load_run(tmp_path / way))
    for by_loop, layer in zip(runs[0].metrics, runs[1].metrics):
        assert by_loop.train_loss == pytest.approx(layer.train_loss, rel=1e-4)
        assert by_loop.test_loss == pytest.approx(layer.test_loss, rel=1e-3)  # running statistics too


@pytest.mark.parametrize("rest", [2, 7, 13])  # images in the last batch, which is cut as the full one is, into twelve
def test_a_last_batch_of_few_images_has_no_ghost_of_one(tmp_path, rest):
    runs = []
    for way in ("loop", "layer"):
        settings = {"model": "f1", "batch_size": 400 - rest, "ghost_batch_size": 32, "ghost_by": way, "epochs": 1}
        runs.append(train(small(method="plain", lr=0.01, **settings), tmp_path / way, QUIET))
    assert runs[0].last.updates == 2
    assert runs[0].last.train_loss == pytest.approx(runs[1].last.train_loss, rel=1e-4)


def test_a_last_batch_of_one_image_is_left_out():
    dataset = load("digits")
    sizes = {rest: 1437 - rest for rest in (1, 2)}
    for rest, size in sizes.items():
        batches = training_batches(resolve(batch_size=size), dataset, torch.device("cpu"))
        assert len(batches) == (1 if rest == 1 else 2)


def test_training_images_have_the_size_at_which_a_network_is_judged(tmp_path):
    """ResNet18's regime cuts 224 × 224, for ImageNet."""
    with pytest.raises(ConfigError, match=r"of 224 × 224, while digits is judged at 8 × 8: choose --augment none or"):
        train(small(model="resnet18"), tmp_path / "run", QUIET)
    train(small(model="resnet18", augment="none", epochs=1, hold_out=1437 - 20), tmp_path / "run", QUIET)


def test_images_larger_in_memory_than_they_are_judged_are_cut():
    dataset = replace(load("digits"), image_shape=(1, 4, 4))
    with pytest.raises(ConfigError, match=r"of 8 × 8, while digits is judged at 4 × 4"):
        training_batches(small(augment="pad-crop-flip"), dataset, torch.device("cpu"))


def test_a_batch_larger_than_the_data_is_the_data():
    batches = training_batches(resolve(batch_size=5000), load("digits"), torch.device("cpu"))
    assert [len(labels) for _, labels in batches.epoch(0)] == [1437]


def test_smoothed_loss_is_the_mean_loss_at_noisy_weights():
    config = small(strength=0.2, strength_schedule="tanh-falling", denoise=False)
    dataset = load_dataset(config)
    model = build_model(config, dataset)
    before = [p.clone() for p in model.parameters()]
    batches = judging_batches(config, dataset, torch.device("cpu"), split="train")
    clean = evaluate(model, batches).loss
    assert smoothed_loss(config, model, batches, 0.0, epoch=0) == clean
    losses = [smoothed_loss(config, model, batches, 0.2, epoch) for epoch in (0, 1, 1)]
    assert losses[0] != losses[1] == losses[2] != clean
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters()))


def test_logging_the_smoothed_loss_does_not_touch_training(tmp_path):
    for log in (False, True):
        train(small(log_smoothed_loss=log, model="f1"), tmp_path / str(log), QUIET)
    without, with_ = (load_run(tmp_path / str(log)) for log in (False, True))
    assert all(each.smoothed_loss is not None for each in with_.metrics)
    strip = [{**vars(each), "smoothed_loss": None} for each in without_times(with_.metrics)]
    assert strip == [vars(each) for each in without_times(without.metrics)]


def test_dropout_is_a_switch(tmp_path):
    config = small(model="odd_models:with_dropout", dropout=0.0)
    assert build_model(config, load("digits"))[2].p == 0.0
    with pytest.raises(ValueError, match=r"dropout=0\.5: mlp has no dropout"):
        build_model(small(dropout=0.5), load("digits"))


def test_a_device_that_is_not_there():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    for name, message in (("cuda", "finds no CUDA device"), ("gpu", "expected auto, cpu")):
        with pytest.raises(ValueError, match=message):
            train(small(), "never-made", Options(device=name, quiet=True))


def test_a_seed_that_diverges_does_not_keep_others_from_training(tmp_path):
    good, bad = (resolve(model="mlp", epochs=1, batch_size=400, seed=seed) for seed in (1, 0))
    bad = replace(bad, lr=1e30)
    with pytest.raises(loop.Diverged):
        train_seeds([bad, good], lambda config: tmp_path / str(config.seed), Options(device="cpu", quiet=True))
    assert load_run(tmp_path / "1").record is not None


@pytest.mark.parametrize("minutes", [-1.0, float("nan")])
def test_a_time_budget_is_one(tmp_path, minutes):
    with pytest.raises(ValueError, match=r"minutes=.*: give a time budget"):
        train(resolve(model="mlp"), tmp_path / "run", Options(device="cpu", quiet=True, minutes=minutes))
