"""Lightning's DDP in two real processes, where it redirects `training_step` through DDP's forward, and its FSDP2."""

import os

import pytest
import torch
from test_lightning import ACCUMULATE, EPOCHS, Regression, fit, loader, network
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from cases import explicit_epoch
from smoothout import SmoothOut
from smoothout.integrations.lightning import SmoothOutCallback
from two_processes import WORLD, gathered

L = pytest.importorskip("lightning.pytorch")
environments = pytest.importorskip("lightning.fabric.plugins.environments")


class Double(Regression):
    """No dropout, whose numbers depend on the rank, and no BatchNorm, whose statistics do."""

    def __init__(self):
        super().__init__()
        self.net = smooth_network()
        self.clean, self.draws = self.copy(), []

    def training_step(self, batch, batch_idx):
        self.draws.append(self.net[0].weight.detach().clone())
        return super().training_step(batch, batch_idx)


def smooth_network():
    layers = [layer for layer in network() if isinstance(layer, nn.Linear | nn.Tanh)]
    return nn.Sequential(*layers)


def fit_on(rank, module, callback, folder, strategy):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "GROUP_RANK": "0"}
    rows = loader().dataset
    train = DataLoader(rows, batch_size=8, sampler=DistributedSampler(rows, WORLD, rank, shuffle=False))
    trainer = fit(
        module,
        [callback],
        folder,
        train=train,
        strategy=strategy,
        devices=WORLD,
        plugins=[environments.TorchElasticEnvironment()],
    )
    assert module.noisy == EPOCHS * 3  # six batches, three to each rank
    assert trainer.global_step == callback.smooth.step_count == EPOCHS * 2  # the last batch of three steps alone


def ddp(rank, folder, shared_noise):
    module, callback = Double(), SmoothOutCallback(0.3, scale="filter", shared_noise=shared_noise)
    fit_on(rank, module, callback, folder, L.strategies.DDPStrategy(process_group_backend="gloo"))
    for p in module.parameters():
        assert torch.equal(*gathered(p))
    assert torch.equal(*gathered(module.draws[0])) is shared_noise
    if shared_noise:
        for p, q in zip(module.net.parameters(), one_process().parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


class Sharded(Double):
    def copy(self):
        return {name: getattr(p, "_local_tensor", p).detach().clone() for name, p in self.net.named_parameters()}

    def is_clean(self):
        now = self.copy()
        return all(torch.equal(now[name], p) for name, p in self.clean.items())

    def configure_model(self):
        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        self.clean = self.copy()

    def on_save_checkpoint(self, checkpoint):
        """The checkpoint has parts of its own making."""


def fsdp2(rank, folder):
    module, callback = Sharded(), SmoothOutCallback(0.3, scale="filter")
    sizes = {"data_parallel_size": WORLD, "tensor_parallel_size": 1, "save_distributed_checkpoint": False}
    strategy = L.strategies.ModelParallelStrategy(process_group_backend="gloo", **sizes)
    fit_on(rank, module, callback, folder, strategy)
    for p, q in zip(module.net.parameters(), one_process().parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-4, atol=1e-5)


def one_process():
    """The sampler deals rows out in turn: a batch of 8 on each of 2 ranks is one of 16 rows in a row."""
    model = smooth_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    smooth = SmoothOut(model, 0.3, scale="filter", shared_noise=True)
    rows = loader().dataset.tensors
    batches = list(zip(*(t.split(8 * WORLD) for t in rows)))
    for _ in range(EPOCHS):
        explicit_epoch(model, optimizer, smooth, batches, ACCUMULATE)
    return model


@pytest.mark.parametrize("shared_noise", [False, True])
def test_ddp_ranks_stay_equal_and_with_shared_noise_equal_one_process(in_two_processes, tmp_path, shared_noise):
    in_two_processes(ddp, str(tmp_path), shared_noise)


def test_fsdp2_equals_one_process(in_two_processes, tmp_path):
    in_two_processes(fsdp2, str(tmp_path))
