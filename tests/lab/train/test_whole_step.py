"""A whole update, with its ghost batches in lanes, trains as the plain loop does; on CUDA as one graph."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from smoothout.lab.config import resolve
from smoothout.lab.data import load
from smoothout.lab.runs import load_run
from smoothout.lab.train import loop
from smoothout.lab.train.lanes import Flat, Lane, Weights, flat_size
from smoothout.lab.train.start import Options, seed_folder, train, train_seeds
from smoothout.lab.train.whole_step import WholeStep, passes_of, why_not

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]

HELD_OUT = 1437 - 637  # a few steps an epoch, the last one short
CASES = {
    "plain, Adam": {"model": "c1", "method": "plain", "dropout": 0.0, "batch_size": 256},
    "plain, ghosts, clipped": {"model": "f1", "method": "plain", "ghost_batch_size": 64, "clip": 0.5, "lr": 0.01},
    "one draw": {"model": "mlp"},
    "one draw, ghosts": {"model": "f1", "ghost_batch_size": 32, "lr": 0.01, "strength": 0.01},
    "a draw a ghost": {"model": "f1", "draws": "ghost", "ghost_batch_size": 32, "lr": 0.01, "strength": 0.01},
    "rising, antithetic": {
        "model": "f1",
        "method": "adasmoothout",
        "draws": "ghost",
        "antithetic": True,
        "ghost_batch_size": 32,
        "lr": 0.01,
        "strength_schedule": "linear",
    },
    "some ghosts clean": {
        "model": "f1",
        "draws": "ghost",
        "clean_share": 0.6,
        "ghost_batch_size": 32,
        "lr": 0.01,
        "strength": 0.01,
    },
    "two ghosts share a draw": {
        "model": "f1",
        "draws": "ghost",
        "ghosts_per_draw": 2,
        "clean_share": 0.2,
        "ghost_batch_size": 32,
        "lr": 0.01,
        "strength": 0.01,
    },
    "noise that stays": {"model": "f1", "ghost_batch_size": 32, "lr": 0.01, "strength": 0.001, "denoise": False},
    "three draws": {"model": "mlp", "method": "adasmoothout", "draws": 3},
    "two draws, ghosts": {"model": "f1", "draws": 2, "ghost_batch_size": 64, "lr": 0.01, "strength": 0.01},
    "the authors'": {"model": "f1", "method": "adasmoothout", "preset": "authors", "lr": 0.01, "ghost_batch_size": 50},
    "ghost layers": {"model": "f1", "ghost_batch_size": 32, "ghost_by": "layer", "lr": 0.01, "strength": 0.01},
    "channels last": {"model": "resnet20", "method": "plain", "channels_last": True, "lr": 0.01, "batch_size": 318},
}


def both(monkeypatch, tmp_path, config, device):
    """The metrics of whole steps and of steps one by one."""
    made = []
    monkeypatch.setattr(loop, "can_capture", lambda around: True)
    init = WholeStep.__init__
    monkeypatch.setattr(WholeStep, "__init__", lambda self, *a, **k: made.append(self) or init(self, *a, **k))
    train(config, tmp_path / "whole", Options(device=device, quiet=True))
    assert made
    monkeypatch.setattr(loop, "can_capture", lambda around: False)
    train(config, tmp_path / "one-by-one", Options(device=device, quiet=True, cuda_graphs=False))
    assert len(made) == 1
    assert bool(made[0]._graphs) == (device == "cuda")
    return load_run(tmp_path / "whole"), load_run(tmp_path / "one-by-one")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
def test_whole_steps_train_as_steps_one_by_one(monkeypatch, tmp_path, settings, device):
    epochs = 4 if device == "cuda" else 2
    config = resolve(**{"batch_size": 150, "epochs": epochs, "hold_out": HELD_OUT, **settings})
    whole, one_by_one = both(monkeypatch, tmp_path, config, device)
    for left, right in zip(whole.metrics, one_by_one.metrics):
        assert left.train_loss == pytest.approx(right.train_loss, rel=2e-3)
        assert left.test_loss == pytest.approx(right.test_loss, rel=2e-2)
        assert left.evaluations == right.evaluations
        assert left.strength == right.strength
    for name, value in one_by_one.weights().items():  # running statistics too
        torch.testing.assert_close(whole.weights()[name].double(), value.double(), rtol=0.02, atol=0.02, msg=name)
    tracked = [name for name in one_by_one.weights() if "num_batches" in name]
    assert all(torch.equal(whole.weights()[name], one_by_one.weights()[name]) for name in tracked)


@pytest.mark.parametrize("device", DEVICES)
def test_one_step_is_the_same_to_rounding(monkeypatch, tmp_path, device):
    settings = {"model": "f1", "draws": "ghost", "ghost_batch_size": 32, "lr": 0.01, "strength": 0.01, "clip": 0.1}
    config = resolve(batch_size=1437, epochs=1, **settings)
    whole, one_by_one = both_once(monkeypatch, tmp_path, config, device)
    for name, value in one_by_one.weights().items():
        torch.testing.assert_close(whole.weights()[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", ["NewBuffer", "NormTwice", "SpareWeights"])
def test_a_users_network_is_trained_as_by_steps_one_by_one(monkeypatch, tmp_path, model, device):
    ghosts = 0 if model == "NewBuffer" else 150
    settings = {"batch_size": 300, "epochs": 1, "ghost_batch_size": ghosts, "lr": 0.01, "method": "plain"}
    config = resolve(model=f"odd_models:{model}", **settings)
    whole, one_by_one = both_once(monkeypatch, tmp_path, config, device)
    for name, value in one_by_one.weights().items():
        torch.testing.assert_close(whole.weights()[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_lanes_are_in_training_mode():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    trained = list(model.parameters())
    lane = Lane(Weights(model, [], None), trained, torch.zeros(flat_size(trained)), None)
    assert lane.replica[1].training


def both_once(monkeypatch, tmp_path, config, device):
    runs = []
    for whole in (True, False):
        monkeypatch.setattr(loop, "can_capture", lambda around, whole=whole: whole)
        train(config, tmp_path / str(whole), Options(device=device, quiet=True, cuda_graphs=False))
        runs.append(load_run(tmp_path / str(whole)))
    return runs


@pytest.mark.parametrize("method", ["plain", "smoothout", "adasmoothout"])
def test_half_precision_weights_are_those_autocast_makes(monkeypatch, tmp_path, method):
    settings = {"model": "c1", "method": method, "dropout": 0.0, "amp": "bf16", "ghost_batch_size": 128}
    config = resolve(batch_size=512, epochs=1, draws="ghost" if method != "plain" else "one", **settings)
    whole, one_by_one = both(monkeypatch, tmp_path, config, "cpu")
    assert whole.metrics[0].train_loss == pytest.approx(one_by_one.metrics[0].train_loss, rel=2e-2)


def test_in_half_precision_passes_see_the_noise_that_stays(monkeypatch, tmp_path):
    """The casts follow the draw of the same update."""
    settings = {"model": "f1", "ghost_batch_size": 64, "amp": "bf16", "lr": 0.01, "strength": 0.02, "denoise": False}
    config = resolve(batch_size=320, epochs=2, **settings)
    whole, one_by_one = both_once(monkeypatch, tmp_path, config, "cpu")
    for left, right in zip(whole.metrics, one_by_one.metrics):
        assert left.train_loss == pytest.approx(right.train_loss, rel=1e-4)
    for name, value in one_by_one.weights().items():
        torch.testing.assert_close(whole.weights()[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("decay", [{}, {"lr_decay": 0.0, "milestones": (2,)}])
def test_an_interrupted_run_goes_on_in_whole_steps(monkeypatch, tmp_path, decay):
    monkeypatch.setattr(loop, "can_capture", lambda around: True)
    settings = {"model": "f1", "batch_size": 300, "ghost_batch_size": 100, "draws": "ghost", "lr": 0.01, **decay}
    config = resolve(epochs=4, hold_out=HELD_OUT, **settings)
    train(config, tmp_path / "all", Options(device="cpu", quiet=True))
    ended = loop.Trainer._end_epoch

    def stop_after_two(self, strength):
        yield from ended(self, strength)
        if self.position.epoch == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(loop.Trainer, "_end_epoch", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "parts", Options(device="cpu", quiet=True))
    monkeypatch.setattr(loop.Trainer, "_end_epoch", ended)
    train(config, tmp_path / "parts", Options(device="cpu", quiet=True))
    left, right = load_run(tmp_path / "all").weights(), load_run(tmp_path / "parts").weights()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("device", DEVICES)
def test_resetting_the_optimizer_forgets_in_place(tmp_path, device):
    config = resolve(model="mlp", batch_size=300, epochs=3, method="plain", reset_optimizer_every_epoch=True)
    train(config, tmp_path / "run", Options(device=device, quiet=True))
    config_kept = replace(config, reset_optimizer_every_epoch=False)
    train(config_kept, tmp_path / "kept", Options(device=device, quiet=True))
    reset, kept = load_run(tmp_path / "run").metrics, load_run(tmp_path / "kept").metrics
    assert reset[0].train_loss == kept[0].train_loss
    assert reset[1].train_loss != kept[1].train_loss


# ---- where it cannot be ----------------------------------------------------------------------------------------------


def trainer_of(monkeypatch, **settings):
    config = resolve(batch_size=128, epochs=1, **settings)
    dataset = load("digits")
    made = []
    monkeypatch.setattr(loop.Trainer, "_make_steps", lambda self: made.append(self))
    return loop.Trainer(config, dataset, loop.Surroundings())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model": "mlp"}, ""),
        ({"model": "f1", "ghost_batch_size": 64}, ""),
        ({"model": "f1", "ghost_batch_size": 64, "ghost_by": "layer"}, ""),
        ({"method": "ensemble", "draws": 2, "model": "mlp"}, "its method"),
        ({"model": "mlp", "denoise": False, "draws": 2}, "several draws a step stay"),
        ({"model": "f1", "ghost_batch_size": 32, "ghost_by": "layer", "draws": 2}, "its buffers"),
    ],
)
def test_it_says_where_it_cannot_be(monkeypatch, settings, reason):
    trainer = trainer_of(monkeypatch, **settings)
    found = why_not(trainer.method, trainer.update, trainer.batches, is_compiled=False)
    assert reason in found
    assert bool(reason) == bool(found)


@pytest.mark.parametrize(
    ("model", "ghosts", "reason"),
    [("SpareWeights", 0, "no gradient"), ("NormTwice", 64, "BatchNorm once"), ("NormTwice", 0, "")],
)
def test_a_pass_shows_where_it_cannot_be(monkeypatch, model, ghosts, reason):
    trainer = trainer_of(monkeypatch, model=f"odd_models:{model}", method="plain", ghost_batch_size=ghosts)
    random, before = torch.get_rng_state(), {name: value.clone() for name, value in trainer.model.state_dict().items()}
    found = why_not(trainer.method, trainer.update, trainer.batches, is_compiled=False)
    assert reason in found
    assert bool(reason) == bool(found)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())


def test_a_compiled_network_and_several_momenta_are_refused(monkeypatch):
    trainer = trainer_of(monkeypatch, model="f1", ghost_batch_size=64)
    assert "compiled" in why_not(trainer.method, trainer.update, trainer.batches, is_compiled=True)
    next(m for m in trainer.model.modules() if isinstance(m, nn.BatchNorm1d)).momentum = 0.3
    assert "momentum" in why_not(trainer.method, trainer.update, trainer.batches, is_compiled=False)


def test_what_cannot_be_captured_is_trained_one_by_one(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(loop, "can_capture", lambda around: True)
    config = resolve(model="mlp", denoise=False, draws=2, epochs=1, batch_size=300)
    train(config, tmp_path / "run", Options(device="cpu"))
    assert "one CUDA graph a ghost batch, not one a step: several draws a step stay" in capsys.readouterr().out


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_passes_are_those_of_the_methods_own_step(monkeypatch):
    trainer = trainer_of(monkeypatch, model="f1", draws="ghost", ghost_batch_size=32, antithetic=True)
    assert passes_of(trainer.method, 4) == [(0, 0, 1.0, 1.0), (1, 0, -1.0, 1.0), (2, 1, 1.0, 1.0), (3, 1, -1.0, 1.0)]
    assert [each.sign for each in passes_of(trainer.method, 3)] == [1.0, 1.0, 1.0]  # an odd number has no pairs


def test_flat_memory_is_seen_with_the_strides_of_others():
    like = [torch.zeros(3, 5), torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.zeros(())]
    flat = Flat(like, torch.float32)
    for value, (view, tensor) in enumerate(zip(flat.views, like), start=1):
        assert (view.shape, view.stride()) == (tensor.shape, tensor.stride())
        assert view.data_ptr() % 16 == flat.all.data_ptr() % 16
        view.fill_(value)
    assert float(flat.all.sum()) == 15 + 2 * 96 + 3


def test_copies_share_what_takes_no_noise():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    weights = Weights(model, [model[0].weight], torch.bfloat16)
    leaves, drawn = weights.for_one_copy()
    others, _ = weights.for_one_copy()
    assert leaves[id(model[1].weight)].data_ptr() == model[1].weight.data_ptr()
    assert leaves[id(model[2].weight)].dtype == torch.bfloat16
    assert leaves[id(model[2].weight)].data_ptr() == others[id(model[2].weight)].data_ptr()
    assert leaves[id(model[0].weight)].data_ptr() != others[id(model[0].weight)].data_ptr()
    assert [t.data_ptr() for t in drawn.destinations] == [leaves[id(model[0].weight)].data_ptr()]
    with torch.no_grad():
        model[2].weight.fill_(1 / 3)
    weights.refresh()
    assert (leaves[id(model[2].weight)] == torch.tensor(1 / 3).bfloat16()).all()


# ---- side by side ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(
    "settings",
    [
        {"model": "c1", "amp": "bf16", "strength": 0.01},
        {"model": "f1", "draws": "ghost", "ghost_batch_size": 64, "strength": 0.01},
        {"model": "c1", "amp": "bf16", "method": "swa"},  # one graph a pass, not one a step
    ],
)
def test_runs_in_turns_are_what_they_are_alone(tmp_path, settings):
    configs = [resolve(batch_size=128, epochs=3, lr=1e-3, seed=seed, **settings) for seed in range(3)]
    options = Options(device="cuda", quiet=True)
    train_seeds(configs, lambda c: seed_folder(tmp_path / "turns", c), replace(options, together=3))
    train_seeds(configs, lambda c: seed_folder(tmp_path / "alone", c), replace(options, together=1))
    for config in configs:
        left, right = (load_run(seed_folder(tmp_path / how, config)) for how in ("turns", "alone"))
        assert left.record.provenance.together == 3
        for one, other in zip(left.metrics, right.metrics):
            assert one.train_loss == pytest.approx(other.train_loss, rel=2e-3)  # dropout masks too


def test_a_split_of_files_is_read_one_by_one(monkeypatch):
    trainer = trainer_of(monkeypatch, model="mlp")
    trainer.batches.split = object()
    assert "files" in why_not(trainer.method, trainer.update, trainer.batches, is_compiled=False)
