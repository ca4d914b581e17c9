"""Two real processes (gloo): DDP, FSDP2, and noise that is one θ per logical tensor."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from smoothout import AdaSmoothOut, SmoothOut, SmoothOutEnsemble, measure
from smoothout.sharding import local_part
from two_processes import WORLD, gathered


def network():
    """Double precision, no BatchNorm; 7 rows do not divide by 2; a transposed convolution whose filters span ranks."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 7),
        nn.Tanh(),
        nn.Unflatten(1, (7, 1)),
        nn.ConvTranspose1d(7, 4, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    ).double()


def grouped():
    """Transposed convolution with groups: a rank's rows may lie in either group."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (6, 1)), nn.ConvTranspose1d(6, 4, 3, groups=2), nn.Flatten(), nn.Linear(12, 3)
    ).double()


def narrow():
    """A dimension of 1: of these weights rank 1 has nothing, but a filter's norm waits for it."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 1), nn.Unflatten(1, (1, 1)), nn.ConvTranspose1d(1, 4, 3), nn.Flatten(), nn.Linear(12, 1)
    ).double()


def batches(n, size=8):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 6, generator=generator, dtype=torch.float64),
            torch.randn(size, 3, generator=generator, dtype=torch.float64),
        )
        for _ in range(n)
    ]


def loss_of(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def part_of(batch, rank):
    return tuple(t.chunk(WORLD)[rank] for t in batch)


def one_process(method, steps, build=network):
    """The unsharded run on the joined batch. Shared noise: this too runs in a process that has a rank."""
    model = build()
    optimizer, smooth = sgd(model), method(model, 0.2, shared_noise=True)
    for batch in batches(steps):
        with smooth.perturbed():
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_equal_on_all_ranks(tensor):
    assert torch.equal(*gathered(tensor))


def ddp_keeps_ranks_equal(rank, attach):
    model = DistributedDataParallel(network())
    smooth, optimizer = AdaSmoothOut(model, 0.2), sgd(model)
    if attach:
        smooth.attach(optimizer)
    draws = []
    model.module.register_forward_hook(lambda m, *_: draws.append(m[0].weight.detach().clone()))
    for batch in batches(100):
        if attach:
            loss_of(model, part_of(batch, rank)).backward()
        else:
            with smooth.perturbed():
                loss_of(model, part_of(batch, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for p in model.parameters():
        assert_equal_on_all_ranks(p)
    assert not torch.equal(*gathered(draws[0]))  # a different θ on each rank


def ddp_keeps_ranks_equal_where_noise_stays(rank, attach):
    model = DistributedDataParallel(network())
    smooth, optimizer = SmoothOut(model, 0.1, denoise=False), sgd(model)
    handle = smooth.attach(optimizer) if attach else None
    for batch in batches(3):
        with nullcontext() if handle else smooth.perturbed():
            loss_of(model, part_of(batch, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for p in model.parameters():
        assert_equal_on_all_ranks(p)


def ddp_with_shared_noise_equals_one_process(rank, method):
    model = DistributedDataParallel(network())
    smooth, optimizer = method(model, 0.2, shared_noise=True), sgd(model)
    for batch in batches(20):
        with smooth.perturbed():
            loss_of(model, part_of(batch, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for p, q in zip(model.parameters(), one_process(method, 20).parameters()):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def ddp_ensemble_equals_one_process(rank):
    one, model = network(), DistributedDataParallel(network())
    ensembles = [SmoothOutEnsemble(m, copies=3, strength=0.2) for m in (one, model)]
    optimizers = [sgd(one), sgd(model)]
    for batch in batches(4):
        ensembles[0].loss(loss_of, batch).backward()
        ensembles[1].loss(loss_of, part_of(batch, rank)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    for option in ("find_unused_parameters", "static_graph"):
        with pytest.raises(ValueError, match=f"leave {option} out"):
            SmoothOutEnsemble(DistributedDataParallel(network(), **{option: True}), copies=3)


def ddp_measured_by_one_rank(rank):
    """After the first backward, when DDP's next forward would speak with all ranks, as it would to share buffers."""
    model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(6).double(), network()))
    first, second = batches(2)
    loss_of(model, part_of(first, rank)).backward()
    if rank == 0:
        found, expected = (measure.sharpness(m, loss_of, [first], restarts=1) for m in (model, model.module))
        assert found == expected
    model.zero_grad()
    loss_of(model, part_of(second, rank)).backward()
    for p in model.parameters():
        assert_equal_on_all_ranks(p.grad)


def ddp_no_sync_accumulation(rank):
    model = DistributedDataParallel(network())
    smooth, optimizer = AdaSmoothOut(model, 0.2, shared_noise=True), sgd(model)
    smooth.attach(optimizer)
    for batch in batches(10):
        first, second = zip(*(t.chunk(2) for t in part_of(batch, rank)))
        with model.no_sync():
            (loss_of(model, first) / 2).backward()
        (loss_of(model, second) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for p, q in zip(model.parameters(), one_process(AdaSmoothOut, 10).parameters()):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def sharded(build):
    model = build()
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def fsdp_equals_one_process(rank, method, attach, build):
    model = sharded(build)
    optimizer = sgd(model)
    smooth = method(model, 0.2)
    if attach:
        smooth.attach(optimizer)
    for batch in batches(15):
        model.eval()
        with torch.no_grad():
            clean = loss_of(model, batch)  # leaves the root group unsharded
        model.train()
        before = {n: p.to_local().clone() for n, p in model.named_parameters()}
        if attach:
            loss = loss_of(model, part_of(batch, rank))
            loss.backward()
        else:
            with smooth.perturbed():
                moved = [
                    not torch.equal(p.to_local(), before[n]) for n, p in model.named_parameters() if before[n].numel()
                ]
                assert all(moved)
                loss = loss_of(model, part_of(batch, rank))
                loss.backward()
                state = model.state_dict()
                assert all(torch.equal(state[n].to_local(), before[n]) for n in before)
        model.reshard()
        for n, p in model.named_parameters():
            assert torch.equal(p.to_local(), before[n])
        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss)
        assert abs(mean_loss.item() / WORLD - clean.item()) > 1e-6  # the noise was there
        optimizer.step()
        optimizer.zero_grad()
    expected = one_process(method, 15, build)
    model.reshard()
    for (name, p), q in zip(model.named_parameters(), expected.parameters()):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def fsdp_is_not_measured(rank):
    for call in (lambda m, b: measure.sensitivity(m, loss_of, b, [0.1]), lambda m, b: measure.sharpness(m, loss_of, b)):
        with pytest.raises(ValueError, match=r"model is sharded .*: measure a full copy of it in one process"):
            call(sharded(network), batches(1))


def fsdp_noise_is_the_unsharded_draw(rank):
    for build in (network, grouped, narrow):
        whole, model = build(), sharded(build)
        for method in (SmoothOut, AdaSmoothOut):
            theta_whole = method(whole, 0.2, shared_noise=True)._perturbation.draw(0.2, 3)
            theta = method(model, 0.2)._perturbation
            for ours, parameter, expected in zip(theta.draw(0.2, 3), model.parameters(), theta_whole):
                start = local_part(parameter).start[0]
                torch.testing.assert_close(ours, expected[start : start + len(ours)], rtol=1e-12, atol=1e-14)


def fsdp_late_backward_raises(rank):
    model = sharded(network)
    smooth = SmoothOut(model, 0.2)
    batch = part_of(batches(1)[0], rank)
    with smooth.perturbed():
        late = loss_of(model, batch)
    with pytest.raises(RuntimeError, match="noise is gone"):
        late.backward()


def fsdp_user_noise_gets_the_whole_tensor(rank):
    class Ramp:
        def draw(self, parameter, generator):
            assert type(parameter) is torch.Tensor
            return torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape) + 1

    model = sharded(network)
    theta = SmoothOut(model, 1.0, noise=Ramp())._perturbation.draw(1.0, 0)
    rows = model[0].weight.shape[0]
    mine = slice(0, 4) if rank == 0 else slice(4, rows)
    assert torch.equal(theta[0], (torch.arange(42.0).view(7, 6) + 1)[mine])


@pytest.mark.parametrize("attach", [False, True])
def test_ddp_parameters_stay_equal_with_noise_per_rank(in_two_processes, attach):
    in_two_processes(ddp_keeps_ranks_equal, attach)


@pytest.mark.parametrize("attach", [False, True])
def test_ddp_parameters_stay_equal_where_noise_stays(in_two_processes, attach):
    in_two_processes(ddp_keeps_ranks_equal_where_noise_stays, attach)


@pytest.mark.parametrize("method", [SmoothOut, AdaSmoothOut])
def test_ddp_with_shared_noise_equals_one_process_on_the_joined_batch(in_two_processes, method):
    in_two_processes(ddp_with_shared_noise_equals_one_process, method)


def test_ddp_no_sync_accumulation(in_two_processes):
    in_two_processes(ddp_no_sync_accumulation)


def test_a_ddp_ensemble_equals_one_process_on_the_joined_batch(in_two_processes):
    in_two_processes(ddp_ensemble_equals_one_process)


def test_one_rank_may_measure_a_ddp_model_alone(in_two_processes):
    in_two_processes(ddp_measured_by_one_rank)


@pytest.mark.parametrize(
    ("method", "attach", "build"),
    [
        (SmoothOut, False, network),
        (AdaSmoothOut, False, network),
        (AdaSmoothOut, True, network),
        (AdaSmoothOut, False, grouped),
    ],
)
def test_fsdp2_restores_exactly_and_equals_the_unsharded_run(in_two_processes, method, attach, build):
    in_two_processes(fsdp_equals_one_process, method, attach, build)


def test_fsdp2_noise_is_the_unsharded_draw(in_two_processes):
    in_two_processes(fsdp_noise_is_the_unsharded_draw)


def test_fsdp2_is_not_measured(in_two_processes):
    in_two_processes(fsdp_is_not_measured)


def test_fsdp2_backward_after_the_exit_raises(in_two_processes):
    in_two_processes(fsdp_late_backward_raises)


def test_fsdp2_hands_a_users_noise_the_whole_tensor(in_two_processes):
    in_two_processes(fsdp_user_noise_gets_the_whole_tensor)


def test_a_process_group_may_begin_after_the_smoothout_was_made():
    model = network()
    smooth = SmoothOut(model, 0.2)
    alone = smooth.perturbation.draw(0.2, 0)
    dist.init_process_group("fake", rank=1, world_size=WORLD, store=FakeStore())
    try:
        mine = smooth.perturbation.draw(0.2, 0)
        assert not torch.equal(mine[0], alone[0])
        for a, b in zip(mine, SmoothOut(model, 0.2).perturbation.draw(0.2, 0)):
            assert torch.equal(a, b)
    finally:
        dist.destroy_process_group()
    assert torch.equal(smooth.perturbation.draw(0.2, 0)[0], alone[0])
