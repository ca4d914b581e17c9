"""Accelerate's real loop, in one process and in two: `attach` after `prepare`, and nothing else changes."""

import os
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cases import assert_equal_models, explicit_epoch
from smoothout import SmoothOut, measure
from smoothout.integrations.accelerate import attach
from two_processes import WORLD, gathered

accelerate = pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402

ACCUMULATE, SETTINGS = 2, {"scale": "filter", "seed": 3}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(64, 6, generator=generator), torch.randn(64, 3, generator=generator))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def accelerator(**settings):
    for state in (AcceleratorState, GradientState, PartialState):  # one process runs many tests
        state._reset_state()
    return accelerate.Accelerator(**{"cpu": True, "gradient_accumulation_steps": ACCUMULATE, **settings})


class Loop:
    """An Accelerate loop with accumulation and clipping that looks at the weights where it should find clean ones."""

    def __init__(self, batch_size=8, strength=0.3, **settings):
        self.accelerator = accelerator(**settings.pop("accelerator", {}))
        model = network()
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, sgd(model), DataLoader(data(), batch_size=batch_size)
        )
        self.smooth = attach(self.accelerator, self.model, self.optimizer, strength, **(SETTINGS | settings))
        self.bare = model
        self.noisy = 0
        self.bare[0].register_forward_hook(self.look)
        self.remember()

    def remember(self):
        self.clean = {name: p.detach().clone() for name, p in self.bare.named_parameters()}

    def is_clean(self):
        return all(torch.equal(p, self.clean[name]) for name, p in self.bare.named_parameters())

    def look(self, *_):
        self.noisy += not self.is_clean()

    def epoch(self):
        self.model.train()
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = (self.model(x) - y).square().mean()
                self.accelerator.backward(loss)
                assert self.is_clean()
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.remember()
        return self


def explicit(epochs, **settings):
    model = network()
    optimizer, smooth = sgd(model), SmoothOut(model, 0.3, **SETTINGS, **settings)
    batches = list(DataLoader(data(), batch_size=8))
    for _ in range(epochs):
        explicit_epoch(model, optimizer, smooth, batches, ACCUMULATE)
    return model


def test_equals_the_explicit_loop_bit_for_bit():
    loop = Loop().epoch().epoch()
    assert_equal_models(loop.bare, explicit(epochs=2))
    assert loop.noisy == 16
    assert loop.smooth.step_count == 8


def test_checkpoints_are_clean_and_resume_is_bit_equal(tmp_path):
    loop = Loop().epoch()
    loop.accelerator.save_state(tmp_path)
    saved = pytest.importorskip("safetensors.torch").load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], p) for name, p in loop.clean.items())
    loop.epoch()
    resumed = Loop(seed=99)  # the seed is the checkpoint's
    resumed.accelerator.load_state(tmp_path)
    resumed.remember()
    resumed.epoch()
    assert_equal_models(resumed.bare, loop.bare)


@pytest.mark.parametrize("draw", ["step", "forward"])
def test_one_theta_per_step_or_per_batch(draw):
    loop, seen = Loop(draw=draw), []
    loop.bare[0].register_forward_hook(lambda m, *_: seen.append(m.weight.detach() - loop.clean["0.weight"]))
    loop.epoch()
    assert torch.equal(seen[0], seen[1]) is (draw == "step")
    assert not torch.equal(seen[1], seen[2])


def test_bf16():
    loop = Loop(accelerator={"mixed_precision": "bf16"}).epoch()
    assert loop.noisy == 8


def test_a_model_that_accelerate_compiles():
    loop = Loop(accelerator={"dynamo_backend": "aot_eager"})
    assert isinstance(loop.model, torch._dynamo.OptimizedModule)
    loop.epoch().epoch()
    assert loop.smooth.step_count == 8
    for p, q in zip(loop.bare.parameters(), explicit(epochs=2).parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def names_that_select_sees(**settings):
    names = []

    def select(name, parameter, module):
        names.append(name)
        return not name.startswith("3.")

    loop = Loop(select=select, **settings)
    assert len(loop.smooth.summary().tensors) == 4  # of two layers
    return names


OWN_NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]


@pytest.mark.parametrize("settings", [{}, {"dynamo_backend": "eager"}])
def test_select_sees_the_models_own_names(settings):
    assert names_that_select_sees(accelerator=settings) == OWN_NAMES


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fp16_with_its_gradient_scaler_on_cuda():
    loop = Loop(accelerator={"mixed_precision": "fp16", "cpu": False})
    before = [p.clone() for p in loop.bare.parameters()]
    loop.epoch().epoch()
    assert loop.accelerator.scaler is not None
    assert loop.noisy == 2 * len(loop.loader)
    assert any(not torch.equal(p, q) for p, q in zip(loop.bare.parameters(), before))


def test_what_is_not_supported_is_refused():
    one, model = accelerator(), network()
    optimizer = sgd(model)
    with pytest.raises(ValueError, match="this model is not one that"):
        attach(one, model, optimizer)
    prepared = one.prepare(model)
    with pytest.raises(ValueError, match="this optimizer is not one that"):
        attach(one, prepared, optimizer)
    with pytest.raises(ValueError, match="use DistributedDataParallel"):
        attach(one, nn.DataParallel(model), one.prepare(optimizer))
    with pytest.raises(ValueError, match="strength=-1"):
        attach(one, prepared, optimizer, -1)
    for kind, reason in (("DEEPSPEED", "buffers of its own"), ("MEGATRON_LM", "use FSDP2")):
        one.state.distributed_type = accelerate.DistributedType(kind)
        with pytest.raises(ValueError, match=reason):
            attach(one, prepared, optimizer)


def as_launched(rank):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1"}


def two_processes_share_noise_and_equal_one(rank):
    as_launched(rank)
    loop = Loop(batch_size=4, shared_noise=True)
    assert isinstance(loop.model, nn.parallel.DistributedDataParallel)
    loop.epoch().epoch()
    assert loop.smooth.step_count == 8
    expected = explicit(epochs=2, shared_noise=True)
    for p, q in zip(loop.bare.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def two_processes_checkpoint_and_resume(rank, folder):
    as_launched(rank)
    draws = []
    loop = Loop()
    loop.bare[0].register_forward_hook(lambda m, *_: draws.append(m.weight.detach().clone()))
    loop.epoch()
    first = gathered(draws[0])
    assert not torch.equal(*first)  # each rank its own θ
    loop.accelerator.save_state(folder)
    loop.epoch()
    resumed = Loop(seed=99)
    resumed.accelerator.load_state(folder)
    resumed.remember()
    resumed.epoch()
    assert_equal_models(resumed.bare, loop.bare)
    for p in resumed.bare.parameters():
        assert torch.equal(*gathered(p))


@pytest.mark.parametrize("dispatch", [False, True])
def test_measuring_on_a_prepared_loader_whose_workers_stay(dispatch):
    """Every evaluation has new ones, in the order of the first, and those of an epoch under way are left alone."""
    configuration = accelerate.DataLoaderConfiguration(dispatch_batches=dispatch)
    loader = accelerator(dataloader_config=configuration).prepare(
        DataLoader(data(), 8, shuffle=True, num_workers=1, persistent_workers=True)
    )
    loss_fn = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure.sensitivity(network(), loss_fn, loader, [0.1])
    epoch = iter(loader.base_dataloader)
    next(epoch)
    measure.sensitivity(network(), loss_fn, loader, [0.1])
    assert loader.base_dataloader._iterator is epoch
    assert len(list(epoch)) == 7


def two_processes_select_by_own_names(rank):
    as_launched(rank)
    for settings in ({}, {"dynamo_backend": "eager"}):
        assert names_that_select_sees(accelerator=settings) == OWN_NAMES


def test_two_processes_select_by_own_names(in_two_processes):
    in_two_processes(two_processes_select_by_own_names)


def test_two_processes_with_shared_noise_equal_one_process(in_two_processes):
    in_two_processes(two_processes_share_noise_and_equal_one)


def test_two_processes_draw_their_own_noise_and_resume_bit_equal(in_two_processes, tmp_path):
    in_two_processes(two_processes_checkpoint_and_resume, str(tmp_path))
