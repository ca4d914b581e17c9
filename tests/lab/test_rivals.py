"""The rivals against their formulas, written out here step by step."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from in_process import smoothout
from smoothout import update_bn
from smoothout.lab.config import resolve
from smoothout.lab.methods import METHODS, Plain
from smoothout.lab.rivals import SharpnessAware, ema, swa
from smoothout.lab.runs import load_run
from smoothout.lab.train.ghost_step import Batch, GhostStep
from smoothout.lab.train.start import Options, train

QUIET = Options(device="cpu", quiet=True)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def batch_of(number):
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(10, 1, 3, 4, generator=generator)
    return Batch(images, torch.randint(3, (10,), generator=generator), total=10)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-2)


def everything(model):
    """Parameters and buffers, as copies."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(one, other):
    assert all(torch.equal(one[name], other[name]) for name in one)


# ---- SAM and ASAM ----------------------------------------------------------------------------------------------------


def sam_by_hand(model, optimizer, batch, rho, adaptive, ghosts=1, clip=0.0):
    """One step; gives the loss at the weights."""

    def gradients(at):
        parts = zip(batch.images.split(10 // ghosts), batch.labels.split(10 // ghosts))
        loss = sum(F.cross_entropy(at(x), y) * len(y) / 10 for x, y in parts)
        return loss.detach(), torch.autograd.grad(loss, list(at.parameters()))

    loss, first = gradients(model)
    weights = list(model.parameters())
    size = [w.detach().abs() if adaptive else torch.ones_like(w) for w in weights]
    norm = torch.sqrt(sum(((t * g) ** 2).sum() for t, g in zip(size, first)))
    top = copy.deepcopy(model)
    with torch.no_grad():
        for w, t, g in zip(top.parameters(), size, first):
            w += rho * t**2 * g / norm
    _, second = gradients(top)
    for w, g in zip(weights, second):
        w.grad = g
    if clip:
        nn.utils.clip_grad_norm_(weights, clip)
    optimizer.step()
    return loss


@pytest.mark.parametrize(("adaptive", "rho"), [(False, 0.05), (False, 1.0), (True, 0.5)])
@pytest.mark.parametrize(("ghosts", "clip"), [(1, 0.0), (2, 0.0), (1, 0.01)])
def test_sam_is_its_formula(model, adaptive, rho, ghosts, clip):
    by_hand = copy.deepcopy(model)
    method = SharpnessAware(GhostStep(model, sgd(model), chunks=ghosts, clip=clip), rho, adaptive)
    optimizer = sgd(by_hand)
    for number in range(4):
        result = method.step(batch_of(number))
        loss = sam_by_hand(by_hand, optimizer, batch_of(number), rho, adaptive, ghosts, clip)
        torch.testing.assert_close(result.loss, loss)
        assert (result.evaluations, method.strength) == (2, rho)
    ours, theirs = everything(model), everything(by_hand)
    for name in ours:  # the running statistics too: `top` is a copy, so that by hand the first pass alone moves them
        torch.testing.assert_close(ours[name], theirs[name], msg=name)


def test_sam_without_a_climb_is_plain_training(model):
    other = copy.deepcopy(model)
    sam, plain = SharpnessAware(GhostStep(model, sgd(model)), 0.0), Plain(GhostStep(other, sgd(other)))
    for number in range(3):
        assert torch.equal(sam.step(batch_of(number)).loss, plain.step(batch_of(number)).loss)
    assert_equal(everything(model), everything(other))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_goes_wrong_on_the_top_leaves_the_weights(model, error):
    method = SharpnessAware(GhostStep(model, sgd(model)), 0.5)
    method.step(batch_of(0))
    before, storage = everything(model), [p.data_ptr() for p in model.parameters()]
    passes = []

    def fail(*_):
        passes.append(everything(model))
        if len(passes) == 2:
            raise error

    with model.register_forward_hook(fail), pytest.raises(error):
        method.step(batch_of(1))
    assert torch.equal(passes[0]["1.weight"], before["1.weight"])
    assert not torch.equal(passes[1]["1.weight"], before["1.weight"])  # it was up there
    assert_equal(everything(model), passes[0])  # the statistics are those of the first pass
    assert [p.data_ptr() for p in model.parameters()] == storage


def test_fp16_takes_the_same_steps_and_skips_one_that_overflows(model):
    other = copy.deepcopy(model)
    exact = SharpnessAware(GhostStep(model, sgd(model)), 0.5)
    update = GhostStep(other, sgd(other), amp="fp16")
    half = SharpnessAware(update, 0.5)
    for number in range(2):
        exact.step(batch_of(number))
        half.step(batch_of(number))
    torch.testing.assert_close(model[1].weight, other[1].weight, atol=1e-2, rtol=5e-2)
    before = other[1].weight.clone()
    update.scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
    half.step(batch_of(2))
    assert torch.equal(other[1].weight, before)
    assert update.scaler.get_scale() < 3e38


def test_sam_leaves_nothing_in_the_state_of_the_optimizer(model):
    optimizer = sgd(model)
    SharpnessAware(GhostStep(model, optimizer), 0.5).step(batch_of(0))
    assert {name for state in optimizer.state.values() for name in state} == {"momentum_buffer"}
    assert "rho" not in optimizer.param_groups[0]


def test_a_missing_extra_is_said_before_training_starts(tmp_path, monkeypatch):
    for name in ("pytorch_optimizer", *(name for name in sys.modules if name.startswith("pytorch_optimizer."))):
        monkeypatch.setitem(sys.modules, name, None)  # what Python makes of a package that is not there
    out = tmp_path / "run"
    done = smoothout("train", "--method=sam", "--model=mlp", "--device=cpu", f"--out={out}", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "error: method='sam' needs the extra: pip install 'smoothout[rivals]', or '.[rivals]' in a checkout\n"
    )
    assert not done.stdout
    assert not out.exists()


# ---- averages --------------------------------------------------------------------------------------------------------


def weights(model):
    return [p.detach().double().clone() for p in model.parameters()]


IMAGES = [(batch.images, batch.labels) for batch in map(batch_of, range(2))]


def judged_weights(method, model, batches):
    with method.judged(lambda: batches):
        return weights(model)


def test_swa_is_the_mean_over_the_ends_of_the_last_epochs(model):
    steps_per_epoch, epochs = 3, 4
    method = swa(GhostStep(model, sgd(model)), 0.5, epochs * steps_per_epoch, steps_per_epoch)
    ends = []
    for step in range(epochs * steps_per_epoch):
        assert method.step(batch_of(step)).evaluations == 1
        if (step + 1) % steps_per_epoch == 0:
            ends.append(weights(model))
        if step + 1 == 2 * steps_per_epoch:  # nothing is averaged yet
            assert all(map(torch.equal, judged_weights(method, model, IMAGES), weights(model)))
    found = judged_weights(method, model, IMAGES)
    expected = [(one + other) / 2 for one, other in zip(*ends[2:])]
    for mean, by_hand in zip(found, expected):
        torch.testing.assert_close(mean, by_hand, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, weights(model), ends[-1]))  # training goes on from its own weights


@pytest.mark.parametrize(
    ("start", "epochs", "averaged"), [(0.0, 4, 4), (0.75, 30, 8), (0.7, 90, 27), (0.99, 2, 1), (0.75, 1, 1)]
)
def test_how_many_epochs_swa_averages(model, start, epochs, averaged):
    method = swa(GhostStep(model, sgd(model)), start, epochs, 1)
    for step in range(epochs):
        method.step(batch_of(step))
    assert int(method.average.n_averaged) == averaged


def test_ema_is_its_recursion(model):
    method = ema(GhostStep(model, sgd(model)), 0.7)
    means = None
    for step in range(5):
        method.step(batch_of(step))
        now = weights(model)
        means = now if means is None else [0.7 * mean + 0.3 * w for mean, w in zip(means, now)]
        for found, mean in zip(judged_weights(method, model, IMAGES), means):
            torch.testing.assert_close(found, mean, rtol=1e-5, atol=1e-6)


def test_statistics_of_an_average_are_measured_on_the_training_images(model):
    method = ema(GhostStep(model, sgd(model)), 0.5)
    for step in range(3):
        method.step(batch_of(step))
    images = [(batch.images, batch.labels) for batch in map(batch_of, range(4))]
    images.append((torch.randn(1, 1, 3, 4), torch.zeros(1, dtype=torch.long)))  # one image alone is left out
    by_hand = copy.deepcopy(method.average.module)
    update_bn(by_hand, images[:-1])
    before = everything(model)
    with pytest.raises(KeyboardInterrupt), method.judged(lambda: images):
        assert_equal(everything(model), everything(by_hand))
        assert not torch.equal(model[2].running_mean, before["2.running_mean"])
        raise KeyboardInterrupt
    assert_equal(everything(model), before)


@pytest.mark.parametrize("method", ["swa", "ema"])
def test_an_average_trains_as_plain_does(tmp_path, method):
    """Dropout's masks too: measuring statistics draws none from the stream of training."""
    settings = {"model": "c1", "batch_size": 160, "hold_out": 1437 - 480, "epochs": 3, "swa_start": 0.0}
    for name in ("plain", method):
        train(resolve(method=name, **settings), tmp_path / name, QUIET)
    plain, averaged = (load_run(tmp_path / name) for name in ("plain", method))
    assert [m.train_loss for m in plain.metrics] == [m.train_loss for m in averaged.metrics]
    assert plain.record.last.test_loss != averaged.record.last.test_loss
    assert averaged.record.last.evaluations == averaged.record.last.updates == 9


# ---- in the lab ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sam", "asam", "swa", "ema", "lpfsgd"])
def test_digits_are_learnt(tmp_path, method):
    record = train(resolve(model="mlp", method=method, epochs=10, batch_size=64), tmp_path, QUIET)
    assert record.last.test_accuracy > 0.9
    assert record.last.updates == 10 * 23
    assert record.last.evaluations == METHODS[method].evaluations * record.last.updates
    assert record.last.strength == pytest.approx(record.config.strength, rel=1e-3)
