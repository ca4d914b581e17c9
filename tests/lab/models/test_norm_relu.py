"""The fused ReLU(BatchNorm(x) + residual): in Triton's interpreter, and on CUDA where there is one."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from interpreter import (
    DEVICE,
    INTERPRETED,
    needs_cuda,
    needs_kernels,
    outside_the_interpreter,
    passes_in_the_interpreter,
    python,
)
from smoothout.lab.models import build
from smoothout.lab.models import norm_relu as module
from smoothout.lab.models.norm_relu import norm_relu


@outside_the_interpreter
def test_in_the_interpreter():
    passes_in_the_interpreter(__file__)


def test_importing_the_models_does_not_import_triton():
    python("-c", "import sys, smoothout.lab.models as m; m.build('resnet20'); assert 'triton' not in sys.modules")


# ---- against torch ---------------------------------------------------------------------------------------------------


def plain(norm, x, residual=None):
    return F.relu(norm(x) if residual is None else norm(x) + residual)


def layer(channels, **kwargs):
    norm = nn.BatchNorm2d(channels, device=DEVICE, **kwargs)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.normal_(norm.bias)
    nn.init.uniform_(norm.running_mean)
    nn.init.uniform_(norm.running_var)
    return norm


def images(shape, dtype=torch.float32, mean=0.5):
    return (torch.randn(shape, device=DEVICE) + mean).to(dtype).contiguous(memory_format=torch.channels_last)


def results(function, norm, x, residual, upstream):
    """Output, gradients of x, weight, bias and residual, and the buffers."""
    x = x.clone().requires_grad_()
    residual = None if residual is None else residual.clone().requires_grad_()
    inputs = [x, norm.weight, norm.bias, *([] if residual is None else [residual])]
    y = function(norm, x, residual)
    if function is norm_relu:
        assert "NormReLU" in type(y.grad_fn).__name__  # the kernels
    gradients = torch.autograd.grad(y, inputs, upstream)
    return [y.detach(), *gradients, *norm.buffers()]


def assert_like_torch(norm, x, residual=None, **tolerance):
    twin, upstream = copy.deepcopy(norm), torch.randn_like(x)
    found, expected = results(norm_relu, norm, x, residual, upstream), results(plain, twin, x, residual, upstream)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride() or x.shape[2:] == (1, 1)  # where strides say nothing
        torch.testing.assert_close(one, other, **tolerance)


@pytest.fixture(params=["one tile", "many tiles"])
def tiles(request, monkeypatch):
    """Small images in as many tiles and groups as large ones would take."""
    if request.param == "many tiles":
        kernels = pytest.importorskip("smoothout.lab.models.norm_relu_kernels")
        for name, value in (("TILE", 512), ("PROGRAMS", 7), ("GROUP", 128)):
            monkeypatch.setattr(kernels, name, value)


SHAPES = [(4, 8, 9, 7), (5, 16, 11, 11), (3, 32, 8, 8), (2, 64, 5, 3), (2, 8, 1, 1), (1, 128, 2, 3)]


@needs_kernels
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch(shape, with_residual):
    x, residual = images(shape), images(shape) if with_residual else None
    if shape[0] * shape[2] * shape[3] > 2:
        assert_like_torch(layer(shape[1]), x, residual, rtol=1e-5, atol=2e-5)
    else:  # of two values a channel, gradients all but cancel
        assert_like_torch(layer(shape[1], eps=0.1), x, residual, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("settings", [{"momentum": 1.0}, {"momentum": 0.3, "eps": 1e-2}])
def test_momentum_and_epsilon(settings):
    assert_like_torch(layer(16, **settings), images((4, 16, 6, 6)), rtol=1e-5, atol=2e-5)


@needs_kernels
def test_without_a_count_of_batches():
    norm = layer(16, momentum=1.0)
    norm.num_batches_tracked = None
    assert_like_torch(norm, images((4, 16, 6, 6)), rtol=1e-5, atol=2e-5)
    assert norm.num_batches_tracked is None


@needs_kernels
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_nearer_the_truth_than_torch(dtype):
    norm, x, residual = layer(16), images((4, 16, 9, 9), dtype), images((4, 16, 9, 9), dtype)
    exact, twin, upstream = copy.deepcopy(norm), copy.deepcopy(norm), torch.randn_like(x)
    # The interpreter cuts bits off where a GPU rounds to bf16.
    room = 2.0 if INTERPRETED and dtype == torch.bfloat16 else 1.05
    truth = results(plain, exact, x.float(), residual.float(), upstream.float())
    found = results(norm_relu, norm, x, residual, upstream)
    by_torch = results(plain, twin, x, residual, upstream)
    for one, other, true in zip(found, by_torch, truth, strict=True):
        assert one.dtype == other.dtype
        # A sign may differ where y is next to 0: so by the mean, not the maximum.
        error, torchs = (one - true).abs().double().mean(), (other - true).abs().double().mean()
        assert error <= torchs * room + 2e-5


@needs_kernels
@pytest.mark.usefixtures("tiles")
def test_a_large_mean_costs_no_more_than_in_torch():
    norm, x = layer(8, momentum=1.0), images((4, 8, 16, 16), mean=1e3)
    exact, twin = copy.deepcopy(norm).double(), copy.deepcopy(norm)
    true, found, by_torch = plain(exact, x.double()), norm_relu(norm, x), plain(twin, x)
    assert (found - true).abs().max() <= (by_torch - true).abs().max() * 1.5 + 1e-6
    torch.testing.assert_close(norm.running_var.double(), exact.running_var, rtol=1e-4, atol=0)


@needs_kernels
def test_not_a_number_stays():
    x = images((2, 8, 4, 4))
    x[0, 3, 0, 0] = float("nan")
    y = norm_relu(layer(8), x)
    assert y[:, 3].isnan().all()
    assert y[:, :3].isfinite().all()


@needs_kernels
def test_repeats_bit_by_bit_and_takes_gradients_of_any_layout():
    norm, x = layer(16), images((4, 16, 6, 6))
    one, other = (norm_relu(norm, x.requires_grad_()) for _ in range(2))
    assert torch.equal(one, other)
    expected = torch.autograd.grad(plain(norm, x).mean((2, 3)).square().sum(), x)[0]  # expanded, after the mean
    found = torch.autograd.grad(one.mean((2, 3)).square().sum(), x)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@needs_kernels
def test_what_must_not_pass_unnoticed():
    norm, x = layer(8), images((2, 8, 4, 4)).requires_grad_()
    first = torch.autograd.grad(norm_relu(norm, x).square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    versions = norm.running_mean._version, norm.running_var._version
    y = norm_relu(norm, x)
    assert norm.running_mean._version > versions[0]
    assert norm.running_var._version > versions[1]
    with torch.no_grad():
        norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- what the kernels leave to torch ---------------------------------------------------------------------------------


class Subclass(nn.BatchNorm2d):
    pass


FALLBACKS = {
    "evaluation": lambda: (layer(8).eval(), images((2, 8, 4, 4))),
    "a subclass": lambda: (Subclass(8, device=DEVICE), images((2, 8, 4, 4))),
    "no weights": lambda: (nn.BatchNorm2d(8, affine=False, device=DEVICE), images((2, 8, 4, 4))),
    "no statistics": lambda: (nn.BatchNorm2d(8, track_running_stats=False, device=DEVICE), images((2, 8, 4, 4))),
    "no momentum": lambda: (layer(8, momentum=None), images((2, 8, 4, 4))),
    "12 channels": lambda: (layer(12), images((2, 12, 4, 4))),
    "contiguous": lambda: (layer(8), images((2, 8, 4, 4)).contiguous()),
    "double precision": lambda: (layer(8).double(), images((2, 8, 4, 4), torch.float64)),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_elsewhere_it_is_torchs(case):
    norm, x = FALLBACKS[case]()
    for residual in (None, torch.randn_like(x)):
        twin = copy.deepcopy(norm)
        assert not module._can_fuse(norm, x, residual)
        assert torch.equal(norm_relu(norm, x, residual), plain(twin, x, residual))
        for one, other in zip(norm.buffers(), twin.buffers()):
            assert torch.equal(one, other)


def test_hooks_and_transforms_are_torchs():
    norm, x, calls = layer(8), images((2, 8, 4, 4)), []
    seen = []
    torch.func.vmap(lambda factor: seen.append(module._can_fuse(norm, factor * x, None)) or factor)(x.new_ones(2))
    with torch.inference_mode():
        seen.append(module._can_fuse(norm, x, None))
    assert seen == [False, False]
    norm.register_forward_hook(lambda *_: calls.append(1))
    norm_relu(norm, x)
    assert calls == [1]
    with pytest.raises(ValueError, match="more than 1 value"):
        norm_relu(layer(8), images((1, 8, 1, 1)))


def test_the_networks_names_and_numbers_stay():
    model = build("resnet20").to(DEVICE).eval()
    names = list(model.state_dict())
    assert names[:7] == [f"stem.{n}" for n in ("0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var",
                                               "1.num_batches_tracked")] + ["stages.0.0.conv1.weight"]  # fmt: skip
    x = torch.randn(2, 3, 32, 32, device=DEVICE)
    y = F.relu(model.stem[1](model.stem[0](x)))
    for block in (block for stage in model.stages for block in stage):
        inner = F.relu(block.bn1(block.conv1(y)))
        y = F.relu(block.bn2(block.conv2(inner)) + block.shortcut(y))
    assert torch.equal(model(x), model.classifier(model.pool(y).flatten(1)))


# ---- CUDA ------------------------------------------------------------------------------------------------------------


def step(model, x, labels, half=True):
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
        loss = F.cross_entropy(model(x), labels)
    return loss, torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.gpu
@needs_cuda
def test_a_captured_graph_replays():
    norm, x, residual = layer(16), images((8, 16, 32, 32)).requires_grad_(), images((8, 16, 32, 32))
    twin, upstream = copy.deepcopy(norm), torch.randn_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(norm_relu(norm, x, residual), [x, norm.weight], upstream)
    torch.cuda.current_stream().wait_stream(stream)
    plain(twin, x, residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = norm_relu(norm, x, residual)
        gradients = torch.autograd.grad(y, [x, norm.weight], upstream)
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        expected = plain(twin, x, residual)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=2e-5)
        for one, other in zip(gradients, torch.autograd.grad(expected, [x, twin.weight], upstream)):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
        for one, other in zip(norm.buffers(), twin.buffers()):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@needs_cuda
def test_a_training_step_of_a_network_equals_torchs(monkeypatch):
    model = build("resnet20").cuda().to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    x, labels = images((128, 3, 32, 32)), torch.randint(10, (128,), device="cuda")
    step(model, x, labels)
    model.load_state_dict(twin.state_dict())
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, gradients = step(model, x, labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    monkeypatch.setenv("SMOOTHOUT_KERNELS", "foreach")
    _, exact = step(copy.deepcopy(twin), x, labels, half=False)
    expected, others = step(twin, x, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)

    def distance(found):
        return sum(float((one - best).norm() / best.norm()) for one, best in zip(found, exact))

    # bf16, twenty layers deep: far from fp32, but no further. Over all gradients: those of 16 numbers scatter.
    assert distance(gradients) <= 1.2 * distance(others)
    for one, other in zip(model.buffers(), twin.buffers()):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
