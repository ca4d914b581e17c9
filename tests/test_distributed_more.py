"""Two real processes (gloo), beyond DDP: FSDP2 with mixed precision, hybrid sharding, distributed checkpoints."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from smoothout import AdaSmoothOut, SmoothOut
from two_processes import WORLD, gathered


def network(dtype=torch.float32):
    """7 rows do not divide by 2."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)
    ).to(dtype)  # fmt: skip


def batches(n, dtype=torch.float32, size=8):
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(n, size, 9, generator=generator, dtype=torch.float64).to(dtype)
    return [(batch[:, :6], batch[:, 6:]) for batch in numbers]


def part_of(batch, rank):
    return tuple(t.chunk(WORLD)[rank] for t in batch)


def sharded(model, **settings):
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model, batch):
    return (model(batch[0]) - batch[1]).float().square().mean()


def train(model, optimizer, data, smooth, rank, attach=False):
    """One step for each batch, on this rank's part of it; everything is put back exactly."""
    for batch in data:
        before = local_weights(model)
        if attach:
            loss_of(model, part_of(batch, rank)).backward()
        else:
            with smooth.perturbed():
                assert any(not torch.equal(p, q) for p, q in zip(local_weights(model), before))
                loss_of(model, part_of(batch, rank)).backward()
        assert all(torch.equal(p, q) for p, q in zip(local_weights(model), before, strict=True))
        optimizer.step()
        optimizer.zero_grad()


def local_weights(model):
    if hasattr(model, "reshard"):
        model.reshard()
        for layer in model:
            if hasattr(layer, "reshard"):
                layer.reshard()
    return [(p.to_local() if hasattr(p, "to_local") else p).detach().clone() for p in model.parameters()]


def whole_weights(model):
    local_weights(model)  # reshards
    return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def one_process(steps, method=AdaSmoothOut, dtype=torch.float32, cast=None):
    """The unsharded run on the joined batch; with `cast` weights and inputs are rounded to it in each forward."""
    model = network(dtype)
    optimizer, smooth = sgd(model), method(model, 0.2, shared_noise=True)
    for batch in batches(steps, dtype):
        with smooth.perturbed():
            if cast is None:
                loss_of(model, batch).backward()
            else:
                weights = {name: p.to(cast) for name, p in model.named_parameters()}
                outputs = torch.func.functional_call(model, weights, (batch[0].to(cast),))
                (outputs - batch[1].to(cast)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


# ---- mixed precision -------------------------------------------------------------------------------------------------


def fsdp2_mixed_precision(rank, attach):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(network(), mp_policy=policy)
    optimizer, smooth = sgd(model), AdaSmoothOut(model, 0.2)
    if attach:
        smooth.attach(optimizer)
    data = [(x, y.bfloat16()) for x, y in batches(20)]
    train(model, optimizer, data, smooth, rank, attach)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    expected = one_process(20, cast=torch.bfloat16)
    for p, q in zip(whole_weights(model), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0.01)  # the noise moved them by 0.04 to 0.2


def mixed_precision_rounds_the_noisy_weights_once(rank):
    """What a layer computes with is bf16(w + θ): the noise is drawn and added in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = sharded(network(), mp_policy=policy)
    smooth, seen = AdaSmoothOut(model, 0.2), []
    model[0].register_forward_pre_hook(lambda m, *_: seen.append(m.weight.detach().clone()))  # gathered by now
    with smooth.perturbed():
        noisy = whole_weights(model)[0].clone()
        assert not torch.equal(noisy, network()[0].weight)
        loss_of(model, part_of(batches(1)[0], rank)).backward()
    assert torch.equal(seen[0], noisy.bfloat16())


@pytest.mark.parametrize("attach", [False, True])
def test_fsdp2_with_mixed_precision_restores_exactly_and_follows_the_unsharded_run(in_two_processes, attach):
    in_two_processes(fsdp2_mixed_precision, attach)


def test_mixed_precision_rounds_the_noisy_weights_once(in_two_processes):
    in_two_processes(mixed_precision_rounds_the_noisy_weights_once)


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


def tensor_parallel_ranks_stay_equal(rank):
    """Layers 0 and 2 are cut; the others are plain tensors, which every rank of the group must see with one θ."""
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 3)).double()
    one = copy.deepcopy(model)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for m, shared in ((model, False), (one, True)):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, foreach=False)  # of plain tensors and DTensors in one list
        SmoothOut(m, 0.1, shared_noise=shared).attach(optimizer)
        for batch in batches(5, torch.float64):
            loss_of(m, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(*gathered(model[3].weight.detach()))
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        torch.testing.assert_close(whole, q, rtol=1e-6, atol=1e-9)


def fsdp2_over_tensor_parallelism(rank):
    """Cut twice along one dimension is refused; along two, a filter's norm is that of all its parts."""
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("data", "tensor"))
    for style, dim in ((ColwiseParallel, 0), (RowwiseParallel, 1)):
        whole, model = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
        model.load_state_dict(whole.state_dict())
        fully_shard(parallelize_module(model, mesh["tensor"], style()), mesh=mesh["data"])
        if dim == 0:
            with pytest.raises(ValueError, match="sharded twice along one dimension"):
                SmoothOut(model)
        else:
            (ours,) = AdaSmoothOut(model, 0.2).perturbation.draw(0.2, 3)
            (expected,) = AdaSmoothOut(whole, 0.2, shared_noise=True).perturbation.draw(0.2, 3)
            torch.testing.assert_close(ours, expected.chunk(WORLD, dim)[rank])


def test_fsdp2_over_tensor_parallelism(in_two_processes):
    in_two_processes(fsdp2_over_tensor_parallelism)


def test_tensor_parallel_ranks_draw_one_theta_for_what_is_not_cut(in_two_processes):
    in_two_processes(tensor_parallel_ranks_stay_equal)


# ---- hybrid sharding -------------------------------------------------------------------------------------------------


def replicas_draw_their_own_noise_and_stay_equal(rank, attach):
    """A (2, 1) mesh: two replicas of one shard each, as DDP."""
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    model, twin = sharded(network(torch.float64), mesh=mesh), DistributedDataParallel(network(torch.float64))
    theta = AdaSmoothOut(model, 0.2)._perturbation.draw(0.2, 0)
    assert not torch.equal(*gathered(theta[0]))
    data = batches(10, torch.float64)
    for m in (model, twin):
        optimizer, smooth = sgd(m), AdaSmoothOut(m, 0.2)
        if attach:
            smooth.attach(optimizer)
        train(m, optimizer, data, smooth, rank, attach)
    for p, q in zip(whole_weights(model), twin.parameters(), strict=True):
        assert torch.equal(*gathered(p))
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def one_theta_for_each_replica_group(rank, shape, shared_noise):
    """Shards of one replica together hold one draw; with shared noise, or one replica, it is the unsharded draw."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model, whole = sharded(network(torch.float64), mesh=mesh), network(torch.float64)
    theta = AdaSmoothOut(model, 0.2, shared_noise=shared_noise)._perturbation.draw(0.2, 3)
    # A whole model's noise has the number of its rank in it; rank 0's is that of shared noise.
    expected = AdaSmoothOut(whole, 0.2, shared_noise=shape == (1, WORLD) or shared_noise)._perturbation.draw(0.2, 3)
    for ours, all_of_it in zip(theta, expected, strict=True):
        mine = all_of_it if shape == (WORLD, 1) else all_of_it.chunk(WORLD)[rank]
        torch.testing.assert_close(ours, mine, rtol=1e-12, atol=1e-14)


def hybrid_sharding_with_shared_noise_equals_one_process(rank, shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = sharded(network(torch.float64), mesh=mesh)
    optimizer, smooth = sgd(model), AdaSmoothOut(model, 0.2, shared_noise=True)
    train(model, optimizer, batches(10, torch.float64), smooth, rank)
    expected = one_process(10, dtype=torch.float64)
    for p, q in zip(whole_weights(model), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("attach", [False, True])
def test_hybrid_sharding_replicas_draw_their_own_noise_as_ddp_ranks_do(in_two_processes, attach):
    in_two_processes(replicas_draw_their_own_noise_and_stay_equal, attach)


@pytest.mark.parametrize(("shape", "shared_noise"), [((2, 1), False), ((2, 1), True), ((1, 2), False)])
def test_hybrid_sharding_has_one_theta_for_each_replica_group(in_two_processes, shape, shared_noise):
    in_two_processes(one_theta_for_each_replica_group, shape, shared_noise)


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_hybrid_sharding_with_shared_noise_equals_one_process(in_two_processes, shape):
    in_two_processes(hybrid_sharding_with_shared_noise_equals_one_process, shape)


# ---- distributed checkpoints -----------------------------------------------------------------------------------------


def resume_through_a_distributed_checkpoint(rank, folder, method):
    def build(seed):
        model = sharded(network())
        return model, sgd(model), method(model, 0.2, seed=seed)

    data = batches(12)
    model, optimizer, smooth = build(seed=3)
    train(model, optimizer, data[:6], smooth, rank)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "smooth": smooth,  # it has state_dict and load_state_dict: that is all that is asked for
    }
    dcp.save(state, checkpoint_id=folder)
    train(model, optimizer, data[6:], smooth, rank)

    resumed, other, fresh = build(seed=99)
    state = {
        "model": get_model_state_dict(resumed),
        "optimizer": get_optimizer_state_dict(resumed, other),
        "smooth": fresh,
    }
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(resumed, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert fresh.step_count == 6
    train(resumed, other, data[6:], fresh, rank)
    for p, q in zip(local_weights(resumed), local_weights(model), strict=True):
        assert torch.equal(p, q)


def a_checkpoint_saved_under_noise_is_clean(rank, folder):
    model = sharded(network())
    before, smooth = whole_weights(model), SmoothOut(model, 0.2)
    with smooth.perturbed():
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    loaded = {"model": {name: torch.zeros_like(p) for name, p in network().state_dict().items()}}  # unsharded
    dcp.load(loaded, checkpoint_id=folder)
    for p, q in zip(loaded["model"].values(), before, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("method", [SmoothOut, AdaSmoothOut])
def test_fsdp2_resumes_bit_equal_through_a_distributed_checkpoint(in_two_processes, tmp_path, method):
    in_two_processes(resume_through_a_distributed_checkpoint, str(tmp_path), method)


def test_a_distributed_checkpoint_saved_under_noise_is_clean(in_two_processes, tmp_path):
    in_two_processes(a_checkpoint_saved_under_noise_is_clean, str(tmp_path))


# ---- DDP, accumulating without synchronisation -----------------------------------------------------------------------


def no_sync_draws(rank, draw):
    """θ of each micro-batch: one a step or one each; gradients are averaged over the ranks at the last only."""
    model = DistributedDataParallel(network(torch.float64))
    optimizer, smooth, seen = sgd(model), AdaSmoothOut(model, 0.2), []
    smooth.attach(optimizer, draw=draw)
    model.module.register_forward_hook(lambda m, *_: seen.append(m[0].weight.detach().clone()))
    for batch in batches(5, torch.float64):
        before = local_weights(model)
        first, second = (part_of(part_of(batch, rank), i) for i in range(2))
        with model.no_sync():
            (loss_of(model, first) / 2).backward()
        assert all(torch.equal(p, q) for p, q in zip(local_weights(model), before))
        (loss_of(model, second) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(seen[0], seen[1]) is (draw == "step")
    assert not torch.equal(*gathered(seen[0]))
    for p in model.parameters():
        assert torch.equal(*gathered(p))
    assert smooth.step_count == 5


@pytest.mark.parametrize("draw", ["step", "forward"])
def test_ddp_no_sync_keeps_ranks_equal_whether_theta_is_shared_or_new(in_two_processes, draw):
    in_two_processes(no_sync_draws, draw)


# ---- communication ---------------------------------------------------------------------------------------------------


def fsdp2_communicates_no_more_than_without_noise(rank):
    """docs/scale.md says so. Filters of these layers lie on one rank."""
    counts = {}
    for how in ("plain", "perturbed", "attached"):
        model = sharded(network())
        optimizer, smooth = sgd(model), AdaSmoothOut(model, 0.2)
        if how == "attached":
            smooth.attach(optimizer)
        for batch in batches(2):  # in the first step FSDP2 sets itself up
            with CommDebugMode() as calls, smooth.perturbed() if how == "perturbed" else nullcontext():
                loss_of(model, part_of(batch, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        counts[how] = dict(calls.get_comm_counts())
    assert counts["plain"]
    assert counts["perturbed"] == counts["plain"]
    assert counts["attached"] == counts["plain"]


def test_fsdp2_communicates_no_more_than_without_noise(in_two_processes):
    in_two_processes(fsdp2_communicates_no_more_than_without_noise)


class Rooted(nn.Module):
    """Its block is sharded by itself; the rest is the root's, which FSDP2 keeps gathered from forward to backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.block, self.head = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.fails = False

    def forward(self, x):
        hidden = torch.tanh(self.block(torch.tanh(self.embedding(x))))
        if self.fails:
            raise ZeroDivisionError
        return self.head(hidden)


def rooted():
    """Unsharded and sharded twins with the same noise."""
    twin, model = Rooted(), Rooted()
    fully_shard(model.block)
    fully_shard(model)
    return twin, model, SmoothOut(twin, 0.3, shared_noise=True), SmoothOut(model, 0.3)


def gradients_of(model):
    grads = [p.grad for p in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]


def after_an_exception_in_the_forward(rank, attached):
    twin, model, _, smooth = rooted()
    ((x, _),) = batches(1)
    if attached:
        smooth.attach(sgd(model))
    model.fails = True
    try:
        if attached:
            model(x)
        else:
            with smooth.perturbed():
                model(x)
    except ZeroDivisionError:
        model.fails = False
    assert not model.fails
    assert all(hasattr(p, "full_tensor") for p in model.parameters())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)
    with torch.no_grad():
        assert torch.equal(model(x), twin(x))


@pytest.mark.parametrize("attached", [False, True])
def test_fsdp2_keeps_no_gathered_noise_of_a_forward_that_raised(in_two_processes, attached):
    in_two_processes(after_an_exception_in_the_forward, attached)


def with_a_clean_pass_between(rank):
    twin, model, of_twin, of_model = rooted()
    of_twin.attach(sgd(twin))
    of_model.attach(sgd(model))
    ((x, _),) = batches(1)
    losses = [each(x).square().mean() for each in (twin, model)]
    with torch.no_grad():
        assert torch.equal(twin(x), model(x))
    for loss in losses:
        loss.backward()
    for ours, expected in zip(gradients_of(model), gradients_of(twin), strict=True):
        torch.testing.assert_close(ours, expected)


def test_fsdp2_gradients_are_those_of_the_noisy_weights_after_a_clean_pass(in_two_processes):
    in_two_processes(with_a_clean_pass_between)


def sharded_after_the_smoothout_was_made(rank):
    """And used since: the root's weights are gathered, and must not be where the noise goes."""
    twin, model = Rooted(), Rooted()
    of_twin, of_model = SmoothOut(twin, 0.3, shared_noise=True), SmoothOut(model, 0.3)
    fully_shard(model.block)
    fully_shard(model)
    ((x, _),) = batches(1)
    model(x)
    for each, smooth in ((twin, of_twin), (model, of_model)):
        with smooth.perturbed():
            each(x).square().mean().backward()
    for ours, expected in zip(gradients_of(model), gradients_of(twin), strict=True):
        torch.testing.assert_close(ours, expected)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)


def test_a_model_may_be_sharded_and_used_after_the_smoothout_was_made(in_two_processes):
    in_two_processes(sharded_after_the_smoothout_was_made)


def gathered_ahead_of_the_noise(rank, attached):
    """As loops do that hide the communication: what comes has the clean values."""
    twin, model, of_twin, of_model = rooted()
    ((x, _),) = batches(1)
    for each, smooth in ((twin, of_twin), (model, of_model)):
        if attached:
            smooth.attach(sgd(each))
        if each is model:
            model.unshard(async_op=True)
            model.block.unshard(async_op=True)
        with nullcontext() if attached else smooth.perturbed():
            each(x).square().mean().backward()
    for ours, expected in zip(gradients_of(model), gradients_of(twin), strict=True):
        torch.testing.assert_close(ours, expected)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)


@pytest.mark.parametrize("attached", [False, True])
def test_fsdp2_weights_that_were_asked_for_ahead_have_the_noise(in_two_processes, attached):
    in_two_processes(gathered_ahead_of_the_noise, attached)


def late_backward_of_a_part(rank):
    _, model, _, smooth = rooted()
    with smooth.perturbed():
        loss = model.block(torch.ones(2, 7)).square().mean()
    with pytest.raises(RuntimeError, match=r"noise is gone|modified by an inplace"):
        loss.backward()


def test_fsdp2_late_backward_of_a_part_that_was_called_alone_raises(in_two_processes):
    in_two_processes(late_backward_of_a_part)
