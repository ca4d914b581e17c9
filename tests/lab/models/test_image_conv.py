"""Our convolution of images of three channels is torch's: in Triton's interpreter here, on CUDA where there is one."""

import copy

import pytest
import torch
from torch import nn

from interpreter import DEVICE, needs_cuda, needs_kernels, outside_the_interpreter, passes_in_the_interpreter
from smoothout.lab.models.image_conv import image_conv
from smoothout.lab.models.registry import build

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no matrices in bf16


@outside_the_interpreter
def test_in_the_interpreter():
    passes_in_the_interpreter(__file__)


def layer(channels=3, **settings):
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, 16, **{"kernel_size": 5, "padding": 2, "bias": False, **settings}, device=DEVICE)
    return conv.to(memory_format=torch.channels_last)


def images(channels=3, size=7):
    return torch.randn(4, channels, size, size, device=DEVICE).contiguous(memory_format=torch.channels_last)


def in_half(function, *operands):
    with torch.autocast(DEVICE, dtype=HALF):
        return function(*operands)


def takes_kernels(conv, x):
    return "GhostConv" in str(in_half(image_conv, conv, x).grad_fn)


@needs_kernels
@pytest.mark.parametrize("settings", [{}, {"channels": 1}, {"kernel_size": 3, "padding": 0}, {"stride": 2}])
def test_result_and_gradients_are_those_of_torch(settings):
    conv, x = layer(**settings), images(settings.get("channels", 3)).requires_grad_()
    y = in_half(image_conv, conv, x)
    assert "GhostConv" in str(y.grad_fn)
    expected = in_half(conv, x)
    assert (y.dtype, y.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)
    upstream = torch.randn_like(y)
    for one, other in zip(*(torch.autograd.grad(result, [x, conv.weight], upstream) for result in (y, expected))):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("batch", [256, 1001])
def test_at_the_shape_of_c1_it_is_as_near_to_fp32_as_cudnn(batch):
    conv = nn.Conv2d(3, 64, 5, padding=2, bias=False, device="cuda").to(memory_format=torch.channels_last)
    x = torch.randn(batch, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    upstream = torch.randn(batch, 64, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)

    def both(result):
        return result.float(), torch.autograd.grad(result, conv.weight, upstream.to(result.dtype))[0]

    found, torchs, exact = both(in_half(image_conv, conv, x)), both(in_half(conv, x)), both(conv.double()(x.double()))
    for one, other, best in zip(found, torchs, exact):
        assert (one - best).norm() <= 1.1 * (other - best).norm()


@needs_kernels
def test_what_it_is_not_made_for_is_left_to_torch():
    assert takes_kernels(layer(), images())
    assert not takes_kernels(layer().eval(), images())  # measuring differentiates twice
    assert "GhostConv" not in str(image_conv(layer(), images()).grad_fn)  # fp32
    assert not takes_kernels(layer(8), images(8))
    assert not takes_kernels(layer(bias=True), images())
    assert not takes_kernels(layer(dilation=2), images(size=9))
    assert not takes_kernels(layer(kernel_size=7), images())
    assert not takes_kernels(layer(padding="same"), images())
    watched = layer()
    watched.register_forward_hook(lambda *_: None)
    assert not takes_kernels(watched, images())


@needs_kernels
def test_c1_trains_with_it_as_without(monkeypatch):
    model = build("c1", input_shape=(3, 16, 16), dropout=0.0).to(DEVICE, memory_format=torch.channels_last)
    twin, x = copy.deepcopy(model), images(size=16)

    def gradients(model):
        loss = in_half(model, x).float().square().mean()
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    found = gradients(model)
    monkeypatch.setenv("SMOOTHOUT_KERNELS", "foreach")
    for one, other in zip(found, gradients(twin)):
        assert (one - other).norm() <= 0.05 * other.norm() + 1e-3
