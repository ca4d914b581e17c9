"""The ghost layer against the obvious loop: each chunk, one after the other, through ordinary BatchNorm."""

import copy

import pytest
import torch
from torch import nn

from smoothout.lab.models import GhostBatchNorm1d, GhostBatchNorm2d, build, chunk_count, chunk_sizes, with_ghost_norm


@pytest.mark.parametrize(
    ("batch", "full_batch", "sizes"),
    [
        (1024, 1024, [128] * 8),
        (2048, 2048, [128] * 16),
        (848, 2048, [53] * 16),  # what 50,000 leaves over at 2048
        (5000, 5000, [129] * 38 + [98]),
        (6000, 6000, [131] * 45 + [105]),
        (100, 100, [100]),
        (5, 2048, [1] * 5),
    ],
)
def test_chunks_are_those_of_the_authors(batch, full_batch, sizes):
    chunks = chunk_count(full_batch, 128)
    assert chunk_sizes(batch, chunks) == sizes
    assert [len(part) for part in torch.zeros(batch).chunk(chunks)] == sizes


def loop_over_micro_batches(layer, x, chunks):
    return torch.cat([layer(part) for part in x.chunk(chunks)])


def pair(kind, dtype=torch.float64, **kwargs):
    """An ordinary layer with parameters and statistics of its own, and the ghost one made from a copy."""
    torch.manual_seed(0)
    plain = kind(6, **kwargs).to(dtype)
    for tensor in (*plain.parameters(), plain.running_mean, plain.running_var):
        if tensor is not None:
            nn.init.uniform_(tensor, 0.5, 1.5)
    return plain, copy.deepcopy(plain)


CASES = {
    "linear": (nn.BatchNorm1d, (24, 6), {}),
    "linear, short last chunk": (nn.BatchNorm1d, (23, 6), {}),
    "sequence": (nn.BatchNorm1d, (24, 6, 5), {}),
    "images": (nn.BatchNorm2d, (24, 6, 5, 3), {}),
    "images, short last chunk": (nn.BatchNorm2d, (21, 6, 5, 3), {}),
    "no affine": (nn.BatchNorm2d, (22, 6, 5, 3), {"affine": False}),
    "momentum 0.3": (nn.BatchNorm2d, (22, 6, 5, 3), {"momentum": 0.3}),
    "cumulative average": (nn.BatchNorm2d, (22, 6, 5, 3), {"momentum": None}),
    "no running statistics": (nn.BatchNorm2d, (22, 6, 5, 3), {"track_running_stats": False}),
}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_loop_over_micro_batches(case, memory_format):
    kind, shape, kwargs = CASES[case]
    plain, ghost = pair(kind, **kwargs)
    with_ghost_norm(ghost, chunks=4)
    for _ in range(3):  # the running statistics must agree over several steps
        x = torch.randn(shape, dtype=torch.float64) * 2 + 1
        if x.dim() == 4:
            x = x.contiguous(memory_format=memory_format)
        upstream = torch.randn(shape, dtype=torch.float64)
        results = []
        for layer, run in ((plain, lambda x: loop_over_micro_batches(plain, x, 4)), (ghost, ghost)):
            leaf = x.clone().requires_grad_()
            y = run(leaf)
            grads = torch.autograd.grad(y, [leaf, *layer.parameters()], upstream)
            results.append((y, *grads, *layer.buffers()))
        for by_loop, by_layer in zip(*results):
            torch.testing.assert_close(by_layer, by_loop)
    x = torch.randn(shape, dtype=torch.float64)
    if plain.track_running_stats:
        torch.testing.assert_close(ghost.eval()(x), plain.eval()(x))
    else:
        torch.testing.assert_close(ghost.eval()(x), loop_over_micro_batches(plain.eval(), x, 4))


def test_chunks_really_are_apart():
    ghost = GhostBatchNorm1d(3, chunks=2)
    x = torch.randn(16, 3)
    before = ghost(x)[:8]
    x[8:] *= 100
    assert torch.equal(ghost(x)[:8], before)
    assert not torch.allclose(nn.BatchNorm1d(3)(x)[:8], before)


def test_channels_last_stays():
    x = torch.randn(8, 4, 5, 5).contiguous(memory_format=torch.channels_last)
    assert GhostBatchNorm2d(4, chunks=2)(x).is_contiguous(memory_format=torch.channels_last)
    assert GhostBatchNorm2d(4, chunks=2)(x.contiguous()).is_contiguous()


def test_a_whole_network_equals_the_loop():
    torch.manual_seed(0)
    plain = build("resnet20")
    ghost = with_ghost_norm(copy.deepcopy(plain), chunks=3)
    x, y = torch.randn(10, 3, 32, 32), torch.randint(10, (10,))  # a short batch: three chunks, of 4, 4 and 2
    nn.functional.cross_entropy(ghost(x), y).backward()
    for part, labels in zip(x.chunk(3), y.chunk(3)):
        (nn.functional.cross_entropy(plain(part), labels) * len(part) / len(x)).backward()
    for by_layer, by_loop in zip(ghost.parameters(), plain.parameters()):
        torch.testing.assert_close(by_layer.grad, by_loop.grad, rtol=1e-3, atol=1e-5)
    for by_layer, by_loop in zip(ghost.buffers(), plain.buffers()):
        torch.testing.assert_close(by_layer, by_loop, rtol=1e-4, atol=1e-5)


def test_turning_a_model_keeps_its_tensors_hooks_and_state():
    model = build("c1")
    tensors = [*model.parameters(), *model.buffers()]
    calls = []
    model.features[2].register_forward_hook(lambda *_: calls.append(1))
    state = copy.deepcopy(model.state_dict())
    assert with_ghost_norm(model, chunks=2) is model
    assert all(one is other for one, other in zip(tensors, [*model.parameters(), *model.buffers()]))
    assert isinstance(model.features[2], GhostBatchNorm2d)
    assert isinstance(model.hidden[1], GhostBatchNorm1d)
    model.load_state_dict(state)
    model(torch.randn(8, 3, 32, 32))
    assert calls == [1]
    assert with_ghost_norm(model, chunks=3).features[2].chunks == 3


def test_bf16_autocast():
    model = with_ghost_norm(build("resnet20"), chunks=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(4, 3, 32, 32)).sum().backward()
    assert model.stem[1].running_mean.dtype == torch.float32
    assert model.stem[1].weight.grad.isfinite().all()


def test_compiles_into_one_graph():
    torch.manual_seed(0)
    ghost = GhostBatchNorm2d(4, chunks=3)
    twin = copy.deepcopy(ghost)
    x = torch.randn(8, 4, 5, 5)
    torch.testing.assert_close(torch.compile(twin, backend="aot_eager", fullgraph=True)(x), ghost(x))
    torch.testing.assert_close(twin.running_var, ghost.running_var)
    assert twin.num_batches_tracked.item() == ghost.num_batches_tracked.item() == 3


def test_refusals():
    with pytest.raises(ValueError, match="chunks=0"):
        with_ghost_norm(build("c1"), chunks=0)
    with pytest.raises(TypeError, match="1 is a SyncBatchNorm"):
        with_ghost_norm(nn.Sequential(nn.BatchNorm2d(3), nn.SyncBatchNorm(3)), chunks=2)
    with pytest.raises(ValueError, match="more than 1 value"):
        GhostBatchNorm1d(3, chunks=4)(torch.randn(1, 3))


@pytest.mark.parametrize(("images", "pairs"), [(4, [2, 2]), (5, [2, 3]), (9, [2, 2, 2, 3])])
def test_no_chunk_is_a_single_image(images, pairs):
    plain, ghost = pair(nn.BatchNorm1d)
    x = torch.randn(images, 6, dtype=torch.float64)
    by_layer = with_ghost_norm(ghost, chunks=5)(x)
    torch.testing.assert_close(by_layer, torch.cat([plain(part) for part in x.split(pairs)]))
    torch.testing.assert_close(list(ghost.buffers()), list(plain.buffers()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("images", [2048, 848, 1000])
def test_on_cuda_equals_the_loop_and_never_waits(images, memory_format):
    plain, ghost = (layer.cuda() for layer in pair(nn.BatchNorm2d, torch.float32))
    with_ghost_norm(ghost, chunks=16)
    x = (torch.randn(images, 6, 8, 8, device="cuda") * 2 + 1).contiguous(memory_format=memory_format).requires_grad_()
    upstream = torch.randn_like(x)
    y = loop_over_micro_batches(plain, x, 16)
    expected = (y, *torch.autograd.grad(y, [x, *plain.parameters()], upstream), *plain.buffers())
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = ghost(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = (y, *torch.autograd.grad(y, [x, *ghost.parameters()], upstream), *ghost.buffers())
    for by_layer, by_loop in zip(found, expected):
        torch.testing.assert_close(by_layer, by_loop, rtol=1e-4, atol=1e-4)
