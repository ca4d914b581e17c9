"""Convolutions and BatchNorm of all ghosts at once, against a loop over ghosts: in the interpreter, and on CUDA."""

import pytest
import torch

from interpreter import (
    DEVICE,
    needs_cuda,
    needs_kernels,
    outside_the_interpreter,
    passes_in_the_interpreter,
)
from smoothout.lab.models.ghost_conv import ghost_conv, ghost_conv_and_around, why_no_kernels
from smoothout.lab.models.stacked_norm import stacked_norm


@outside_the_interpreter
def test_in_the_interpreter():
    passes_in_the_interpreter(__file__)


def images(*shape, dtype=torch.float32):
    x = torch.randn(shape, device=DEVICE).to(dtype).contiguous(memory_format=torch.channels_last)
    return x.requires_grad_()


def stacked_weights(ghosts, outputs, channels, kernel, dtype=torch.float32):
    weight = torch.randn(ghosts, outputs, kernel, kernel, channels, device=DEVICE) / (kernel * channels**0.5)
    return weight.to(dtype).permute(0, 1, 4, 2, 3).requires_grad_()


def with_gradients(function, leaves, upstream):
    y = function()
    return y, *torch.autograd.grad(y, leaves, upstream)


def both(monkeypatch, function, leaves, kind):
    """Output and gradients by the kernels, and by the loop over ghosts."""
    y = function()
    assert kind in type(y.grad_fn).__name__  # the kernels
    upstream = torch.randn_like(y)
    found = with_gradients(function, leaves, upstream)
    with monkeypatch.context() as context:
        context.setenv("SMOOTHOUT_KERNELS", "foreach")
        expected = with_gradients(function, leaves, upstream)
    assert kind not in type(expected[0].grad_fn).__name__
    return found, expected


# ---- convolutions ----------------------------------------------------------------------------------------------------

# Channels, outputs, kernel, stride.
LAYERS = [(3, 16, 3, 1), (16, 16, 3, 1), (16, 32, 3, 2), (32, 32, 3, 1), (16, 32, 1, 2), (8, 24, 1, 1)]


@needs_kernels
@pytest.mark.parametrize(("channels", "outputs", "kernel", "stride"), LAYERS)
def test_convolutions_equal_the_loop(monkeypatch, channels, outputs, kernel, stride):
    size = (5, 5) if channels == outputs else (6, 5)
    x, weight = images(4, channels, *size), stacked_weights(2, outputs, channels, kernel)
    found, expected = both(monkeypatch, lambda: ghost_conv(x, weight, stride, kernel // 2), [x, weight], "GhostConv")
    for one, other in zip(found, expected):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.stride() == other.stride() or kernel == 1  # where strides are not unique
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize(
    ("channels", "outputs", "dtype"),
    [
        *((*sizes, torch.float16) for sizes in ((16, 16), (32, 32), (64, 16), (16, 24), (24, 16), (16, 72))),
        (16, 16, torch.float32),  # by the other kernel, whatever the size
    ],
)
def test_the_weights_gradient_by_whole_rows_equals_the_loop(monkeypatch, channels, outputs, dtype):
    """Several tiles, the last one not full; images of three rows, so that tiles do not end with them."""
    kernels = pytest.importorskip("smoothout.lab.models.ghost_conv_kernels")
    tuning = kernels.Tuning(pixels=64, depth=16, warps=4, stages=2, programs=20)
    launched, launch = [], kernels._launch
    monkeypatch.setattr(kernels, "WEIGHTS", {64: tuning})
    monkeypatch.setattr(
        kernels, "_launch", lambda kernel, *rest, **how: (launched.append(kernel), launch(kernel, *rest, **how))
    )
    x, weight = images(14, channels, 3, 7, dtype=dtype), stacked_weights(2, outputs, channels, 3, dtype=dtype)
    upstream = torch.randn_like(ghost_conv(x, weight, 1, 1))
    found = with_gradients(lambda: ghost_conv(x, weight, 1, 1), [x, weight], upstream)
    few = outputs <= kernels.MOST_CHANNELS_BY_ROWS
    assert (kernels.row_weights_kernel in launched) == (few and dtype == torch.float16)
    monkeypatch.setenv("SMOOTHOUT_KERNELS", "foreach")
    exact = [t.detach().float().requires_grad_() for t in (x, weight)]
    expected = with_gradients(lambda: ghost_conv(*exact, 1, 1), exact, upstream.float())
    close = 1e-4 if dtype == torch.float32 else 1e-3  # sums are made in fp32 and rounded once
    for one, other in zip(found, expected):
        torch.testing.assert_close(one.float(), other, rtol=close, atol=close)


@needs_kernels
@pytest.mark.parametrize("depth", [16, 32])
def test_many_tiles_and_splits(monkeypatch, depth):
    kernels = pytest.importorskip("smoothout.lab.models.ghost_conv_kernels")
    small = {"pixels": 16, "depth": depth, "warps": 4, "stages": 2}
    monkeypatch.setattr(kernels, "IMAGES", {16: kernels.Tuning(**small)})
    monkeypatch.setattr(kernels, "WEIGHTS", {8: kernels.Tuning(**small, programs=20)})
    half = {"dtype": torch.float16}  # in fp32 tiles are small anyway
    x, weight = images(4, 16, 5, 7, **half), stacked_weights(2, 16, 16, 3, **half)
    found, expected = both(monkeypatch, lambda: ghost_conv(x, weight, 1, 1), [x, weight], "GhostConv")
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


@needs_kernels
@pytest.mark.parametrize(("outputs", "stride"), [(16, 1), (24, 2)])
def test_gradients_of_a_path_around_are_added(monkeypatch, outputs, stride):
    x, weight = images(4, 16, 6, 5), stacked_weights(2, outputs, 16, 3)

    def gradients():
        y, again = ghost_conv_and_around(x, weight, stride, 1)
        assert torch.equal(again, x)
        return torch.autograd.grad(y.square().sum() + again.pow(3).sum(), [x, weight])

    found = gradients()
    (alone,) = torch.autograd.grad(ghost_conv_and_around(x, weight, stride, 1)[1].pow(3).sum(), x)
    torch.testing.assert_close(alone, 3 * x * x)
    monkeypatch.setenv("SMOOTHOUT_KERNELS", "foreach")
    for one, other in zip(found, gradients()):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


@needs_kernels
def test_a_tuning_is_that_of_the_channels():
    kernels = pytest.importorskip("smoothout.lab.models.ghost_conv_kernels")
    found = [kernels.tuning_for(channels, {16: "few", 64: "many"}) for channels in (3, 16, 17, 64, 65)]
    assert found == ["few", "few", "many", "many", "many"]


@needs_kernels
def test_ghosts_may_share_weights_and_images_need_no_gradient():
    x, own = images(6, 3, 5, 5).detach(), stacked_weights(1, 16, 3, 3).detach()
    shared = own.expand(3, -1, -1, -1, -1).requires_grad_()
    y = ghost_conv(x, shared, 1, 1)
    torch.testing.assert_close(y, torch.nn.functional.conv2d(x, own[0], padding=1), rtol=1e-4, atol=1e-4)
    assert torch.autograd.grad(y.sum(), shared)[0].shape == shared.shape


@needs_kernels
def test_gradients_of_weights_have_their_strides():
    for weight in (stacked_weights(2, 16, 16, 1), stacked_weights(2, 16, 16, 1).detach().contiguous().requires_grad_()):
        gradient = torch.autograd.grad(ghost_conv(images(2, 16, 2, 2), weight).sum(), weight)[0]
        assert gradient.stride() == weight.stride()


@needs_kernels
@pytest.mark.parametrize(("channels", "outputs", "stride"), [(3, 16, 1), (16, 32, 2), (32, 32, 1)])
def test_half_precision_is_rounded_once(monkeypatch, channels, outputs, stride):
    # The interpreter multiplies no matrices in bf16.
    x = images(4, channels, 6, 6, dtype=torch.float16)
    weight = stacked_weights(2, outputs, channels, 3, torch.float16)
    found, expected = both(monkeypatch, lambda: ghost_conv(x, weight, stride, 1), [x, weight], "GhostConv")
    for one, other in zip(found, expected):
        assert one.dtype == torch.float16
        torch.testing.assert_close(one, other, rtol=4e-3, atol=4e-3)


@needs_kernels
def test_results_repeat_bit_by_bit():
    x, weight = images(4, 16, 6, 6), stacked_weights(2, 16, 16, 3)
    one, other = (torch.autograd.grad(ghost_conv(x, weight, 1, 1).square().sum(), [x, weight]) for _ in range(2))
    assert all(map(torch.equal, one, other))


def test_it_says_what_there_are_no_kernels_for():
    assert not why_no_kernels(stacked_weights(2, 16, 3, 3))
    assert "7 × 7" in why_no_kernels(stacked_weights(2, 16, 3, 7))
    assert "channels-last" in why_no_kernels(stacked_weights(2, 16, 16, 3).contiguous())
    assert "float64" in why_no_kernels(stacked_weights(2, 16, 16, 3, torch.float64))
    assert not why_no_kernels(stacked_weights(2, 16, 16, 1).contiguous())


# ---- BatchNorm -------------------------------------------------------------------------------------------------------


def norm_case(shape, ghosts, dtype=torch.float32):
    channels = shape[1]
    x, residual = images(*shape, dtype=dtype), images(*shape, dtype=dtype)
    weight = (torch.rand(ghosts, channels, device=DEVICE) + 0.5).requires_grad_()
    bias = torch.randn(channels, device=DEVICE).expand(ghosts, channels).requires_grad_()
    memory = torch.zeros(ghosts, 3 * channels, device=DEVICE)  # rows longer than what a layer has of them
    return x, residual, weight, bias, (memory[:, :channels].data, memory[:, channels : 2 * channels].data)


@needs_kernels
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_norms_equal_the_loop(monkeypatch, with_residual, relu):
    x, residual, weight, bias, statistics = norm_case((6, 16, 5, 7), 3)
    leaves = [x, weight, bias, *([residual] if with_residual else [])]
    left = []

    def function():
        y = stacked_norm(x, weight, bias, statistics, 1e-5, residual if with_residual else None, relu)
        left.append([t.clone() for t in statistics])
        return y

    found, expected = both(monkeypatch, function, leaves, "StackedNorm")
    for one, other in zip([*found, *left[0]], [*expected, *left[-1]]):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


# ---- CUDA ------------------------------------------------------------------------------------------------------------

STAGES = [(3, 16, 3, 1, 32), (16, 16, 3, 1, 32), (16, 32, 3, 2, 32), (32, 32, 3, 1, 16), (32, 64, 1, 2, 16),
          (64, 64, 3, 1, 8)]  # fmt: skip


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("per_ghost", [128, 53])  # of a full batch of CIFAR, and of its last one
@pytest.mark.parametrize(("channels", "outputs", "kernel", "stride", "size"), STAGES)
def test_convolutions_at_real_shapes(monkeypatch, channels, outputs, kernel, stride, size, per_ghost):
    x = images(16 * per_ghost, channels, size, size, dtype=torch.bfloat16)
    weight = stacked_weights(16, outputs, channels, kernel, torch.bfloat16)
    found, expected = both(monkeypatch, lambda: ghost_conv(x, weight, stride, kernel // 2), [x, weight], "GhostConv")
    for one, other in zip(found, expected):
        assert one.stride() == other.stride() or kernel == 1
        assert (one.float() - other.float()).norm() <= 1e-2 * other.float().norm()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("shape", [(2048, 16, 32, 32), (848, 32, 16, 16), (2048, 64, 8, 8)])
def test_norms_at_real_shapes(monkeypatch, shape):
    """Against fp32: torch in bf16 rounds before the sum and so closes other gates of the ReLU."""
    x, residual, weight, bias, statistics = norm_case(shape, 16, torch.bfloat16)
    y = stacked_norm(x, weight, bias, statistics, 1e-5, residual)
    assert "StackedNorm" in type(y.grad_fn).__name__
    upstream = torch.randn_like(y)
    found = y, *torch.autograd.grad(y, [x, weight, bias, residual], upstream)
    monkeypatch.setenv("SMOOTHOUT_KERNELS", "foreach")
    exact, kept = (t.detach().float().requires_grad_() for t in (x, residual))
    y = stacked_norm(exact, weight, bias, statistics, 1e-5, kept)
    expected = y, *torch.autograd.grad(y, [exact, weight, bias, kept], upstream.float())
    for one, other in zip(found, expected):
        assert (one.float() - other).norm() <= 1e-2 * other.norm()


@pytest.mark.gpu
@needs_cuda
def test_a_captured_graph_replays(monkeypatch):
    x, weight = images(256, 16, 32, 32, dtype=torch.bfloat16), stacked_weights(2, 16, 16, 3, torch.bfloat16)
    _, _, scale, bias, statistics = norm_case((4, 16, 2, 2), 2)
    upstream = torch.randn_like(x)

    def function():
        y = stacked_norm(ghost_conv(x, weight, 1, 1), scale, bias, statistics, 1e-5, x)
        return y, *torch.autograd.grad(y, [x, weight, scale, bias], upstream)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function()
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        for one, other in zip(found, function()):
            assert torch.equal(one, other)
