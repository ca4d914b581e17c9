"""All ghosts in one pass: updates are those of lanes and of steps one by one."""

import copy

import pytest
import torch
from torch import nn

from smoothout.lab.config import resolve
from smoothout.lab.data import Dataset
from smoothout.lab.data.dataset import Split
from smoothout.lab.models.resnet import cifar_resnet
from smoothout.lab.train import loop, whole_step
from smoothout.lab.train.lanes import Weights
from smoothout.lab.train.loop import Surroundings, Trainer
from smoothout.lab.train.stacked import why_not_stacked

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]
GHOST_NOISE = {"method": "adasmoothout", "draws": "ghost", "strength": 0.05}
CASES = {
    "plain": {"method": "plain"},
    "clipped": {"method": "plain", "clip": 0.5},
    "one draw": {"method": "smoothout", "draws": "one", "strength": 0.01},
    "a draw a ghost": GHOST_NOISE,
    "antithetic": GHOST_NOISE | {"antithetic": True},
    "half of them clean": GHOST_NOISE | {"clean_share": 0.5},
    "one of them clean": GHOST_NOISE | {"clean_share": 0.25},
    "two share a draw": GHOST_NOISE | {"ghosts_per_draw": 2},
    "four share a draw": GHOST_NOISE | {"ghosts_per_draw": 4},
    "noise on BatchNorm": GHOST_NOISE | {"perturb_bn": True},
    "noise on BatchNorm alone": GHOST_NOISE | {"perturb_bn": True, "perturb_weights": False},
    "noise that stays": {"method": "adasmoothout", "draws": "one", "strength": 0.01, "denoise": False},
}
# Each ghost's comes on top of that of the ghost before, which lanes side by side cannot have. The steps are small: at
# 0.01 a rounding error that turns one ReLU moves weights by 1e-3 in a few epochs, in one seed of four.
STAYS = {"denoise": False, "draws": "ghost", "lr": 3e-4}
NOISE_PILES_UP = {
    "piling up": {"method": "smoothout", "strength": 0.01, **STAYS},
    "by filters": GHOST_NOISE | STAYS,
    "on BatchNorm": GHOST_NOISE | STAYS | {"perturb_bn": True, "antithetic": True},
}


def trainer(settings, device, images):
    """Of ResNet20, batches of 16 in four ghosts and a short one of 12."""
    torch.manual_seed(0)
    shape = (3, images, images)
    parts = [
        Split(torch.randint(256, (n, *shape), dtype=torch.uint8), torch.randint(10, (n,)), (0.5,) * 3, (0.25,) * 3)
        for n in (28, 4)
    ]
    dataset = Dataset("random", *parts, class_names=tuple("0123456789"), image_shape=shape)
    base = {"dataset": "cifar10", "model": "resnet20", "batch_size": 16, "ghost_batch_size": 4, "epochs": 1, "lr": 0.01}
    config = resolve(**{**base, "channels_last": True, **settings})
    return Trainer(config, dataset, Surroundings(device=torch.device(device)))


def after_an_epoch(monkeypatch, how, settings, device, images, epochs=1, stacks=whole_step.STACKS):
    """The network's numbers, and the losses."""
    monkeypatch.setattr(loop, "can_capture", lambda around: how != "one by one")
    monkeypatch.setattr(whole_step, "STACKED", how == "stacked")
    run = trainer(settings, device, images)
    run.model.train()
    assert isinstance(run.steps, whole_step.OneByOne) == (how == "one by one")
    if how != "one by one":
        assert len(run.steps._stacks) == (stacks if how == "stacked" else 0)
    losses = []
    for epoch in range(epochs):
        run.steps.begin(epoch, 0)
        for step in range(len(run.batches)):
            run.steps.step(step)
        losses.append(run._losses.clone())
    return {"losses": torch.cat(losses), "correct": run._correct, **run.model.state_dict()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
def test_updates_are_those_of_lanes_and_of_steps_one_by_one(monkeypatch, settings, device):
    found = after_an_epoch(monkeypatch, "stacked", settings, device, 8)
    for other in ("lanes", "one by one"):
        assert_equal(found, after_an_epoch(monkeypatch, other, settings, device, 8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", NOISE_PILES_UP.values(), ids=NOISE_PILES_UP.keys())
def test_noise_of_a_draw_a_ghost_piles_up_as_in_steps_one_by_one(monkeypatch, settings, device):
    epochs = 4 if device == "cuda" else 2
    found = after_an_epoch(monkeypatch, "stacked", settings, device, 8, epochs)
    assert_equal(found, after_an_epoch(monkeypatch, "one by one", settings, device, 8, epochs))
    taken_back = after_an_epoch(monkeypatch, "stacked", settings | {"denoise": True}, device, 8, epochs)
    assert not torch.allclose(found["stem.0.weight"], taken_back["stem.0.weight"], rtol=1e-2)


def test_noise_that_piles_up_is_drawn_one_by_one_where_not_all_ghosts_are_seen_in_one_pass(monkeypatch):
    monkeypatch.setattr(loop, "can_capture", lambda around: True)
    monkeypatch.setattr(whole_step, "STACKED", False)
    run = trainer(NOISE_PILES_UP["piling up"], "cpu", 8)
    assert isinstance(run.steps, whole_step.OneByOne)
    assert "several draws a step stay" in whole_step.why_not(run.method, run.update, run.batches, is_compiled=False)


def assert_equal(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", [GHOST_NOISE, CASES["one draw"]], ids=["a draw a ghost", "one draw"])
def test_ghosts_may_be_seen_in_several_passes(monkeypatch, settings, device):
    epochs = 4 if device == "cuda" else 1  # from the third on in a graph
    found = []
    for stacks, streams in ((1, 1), (2, 1), (2, 2), (4, 2)):
        monkeypatch.setattr(whole_step, "STACKS", stacks)
        monkeypatch.setattr(whole_step, "STACK_STREAMS", streams)
        found.append(after_an_epoch(monkeypatch, "stacked", settings, device, 8, epochs, stacks))
        assert_equal(found[-1], found[0])


@pytest.mark.parametrize("settings", [CASES["plain"], GHOST_NOISE, CASES["noise on BatchNorm"]])
def test_half_precision(monkeypatch, settings):
    settings = settings | {"amp": "bf16"}
    found, expected = (after_an_epoch(monkeypatch, how, settings, "cpu", 8) for how in ("stacked", "lanes"))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-2, atol=2e-2, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("settings", [CASES["plain"], GHOST_NOISE, CASES["noise on BatchNorm"]])
def test_in_a_graph_at_half_precision(monkeypatch, settings):
    settings = settings | {"amp": "bf16"}
    found, expected = (
        after_an_epoch(monkeypatch, how, settings, "cuda", 32, epochs=4) for how in ("stacked", "one by one")
    )
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=5e-2, atol=5e-2)
    for name, value in expected.items():
        if "num_batches" in name:
            assert torch.equal(found[name], value)


def test_gradients_have_the_strides_of_the_parameters(monkeypatch):
    """Then one kernel copies many of them."""
    found = []
    copied = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *lists: found.extend(zip(*lists)) or copied(*lists))
    after_an_epoch(monkeypatch, "stacked", CASES["plain"] | {"amp": "bf16"}, "cpu", 8)
    pairs = [(one, other) for one, other in found if one.dim() != 4]  # convolutions' come from torch here
    assert len(pairs) > 100
    assert all(one.stride() == other.stride() for one, other in pairs)


# ---- where it cannot be ----------------------------------------------------------------------------------------------


def changed(change):
    model = cifar_resnet(8)
    change(model)
    return model


OTHERS = {
    "not a ResNet": nn.Linear(4, 2),
    "hooks": changed(lambda m: m.stages[0][0].register_forward_hook(lambda *_: None)),
    "a layer Conv2d": changed(lambda m: setattr(m.stem, "0", nn.Conv2d(3, 16, 3, padding=1))),
    "a layer ReLU": changed(lambda m: m.stem.append(nn.ReLU())),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_it_says_which_networks_it_is_not_for(reason):
    assert reason in why_not_stacked(OTHERS[reason], None, 4, [8] * 4)


def test_it_says_which_batches_it_is_not_for():
    model = cifar_resnet(8)
    assert not why_not_stacked(model, None, 4, [8] * 4)
    assert "several sizes" in why_not_stacked(model, None, 4, [5, 5, 5, 4])
    assert "several sizes" in why_not_stacked(model, None, 4, [5] * 3)
    assert "several times" in why_not_stacked(model, 2, 4, [8] * 4)
    assert "one ghost" in why_not_stacked(model, None, 1, [8])


def test_a_batch_with_ghosts_of_several_sizes_is_seen_in_lanes(monkeypatch):
    settings = GHOST_NOISE | {"batch_size": 18, "ghost_batch_size": 6}  # of the last batch 4, 3 and 3
    found = after_an_epoch(monkeypatch, "stacked", settings, "cpu", 8, stacks=1)  # three have no halves
    expected = after_an_epoch(monkeypatch, "one by one", settings, "cpu", 8)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


# ---- weights of ghosts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_norms", [False, True])
def test_each_ghost_has_aligned_weights_of_its_own(on_norms):
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)).to(memory_format=torch.channels_last)
    noisy = [model[0].weight, *([model[1].weight] if on_norms else [])]
    leaves, drawn = Weights(model, noisy, torch.bfloat16).for_ghosts(3, 3)
    leaf = leaves[id(model[0].weight)]
    assert (leaf.shape, leaf.dtype, leaf.stride()[1:]) == ((3, 5, 3, 3, 3), torch.bfloat16, model[0].weight.stride())
    assert len({leaf[g].data_ptr() for g in range(3)}) == 3
    for g, each in enumerate(drawn):
        assert all(t.data_ptr() % 16 == 0 and t.stride() == p.stride() for t, p in zip(each.destinations, noisy))
        assert len({t.dtype for t in each.destinations}) == 1
        torch._foreach_zero_(each.destinations)
        torch._foreach_add_(each.destinations, g + 1.0)
        each.finish()
    for p in noisy:
        assert all((leaves[id(p)][g] == g + 1).all() for g in range(3))


def test_ghosts_share_one_draw_and_what_takes_no_noise():
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5))
    leaves, drawn = Weights(copy.copy(model), [model[0].weight], None).for_ghosts(3, 1)
    assert len(drawn) == 1
    for p in model.parameters():
        assert leaves[id(p)].shape == (3, *p.shape)
        assert leaves[id(p)].stride(0) == 0
    assert leaves[id(model[1].weight)].data_ptr() == model[1].weight.data_ptr()
