"""A ResNet with BatchNorm folded into its convolutions, against the network in evaluation mode."""

import pytest
import torch
from torch import nn

from interpreter import DEVICE, needs_cuda, needs_kernels, outside_the_interpreter, passes_in_the_interpreter
from smoothout.lab.config import resolve
from smoothout.lab.models import folded
from smoothout.lab.models.folded import FoldedResNet
from smoothout.lab.models.resnet import cifar_resnet, resnet18
from smoothout.lab.train.evaluate import evaluate, evaluated, in_numbers, quick_network


@outside_the_interpreter
def test_in_the_interpreter():
    passes_in_the_interpreter(__file__)


def trained(model):
    """As if: statistics and scales that are not the first ones, some scales negative."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.to(DEVICE, memory_format=torch.channels_last).eval()


def images(number, size, dtype=torch.float32):
    return torch.randn(number, 3, size, size, device=DEVICE, dtype=dtype).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("make", [lambda: cifar_resnet(8), lambda: resnet18(10)], ids=["CIFAR", "ImageNet"])
def test_without_our_kernels_it_is_the_network(monkeypatch, make):
    monkeypatch.setenv("SMOOTHOUT_KERNELS", "foreach")
    torch.manual_seed(0)
    model, x = trained(make()), images(2, 32)
    torch.testing.assert_close(FoldedResNet(model, torch.float32)(x), model(x), rtol=1e-4, atol=1e-4)


@needs_kernels
def test_with_our_kernels_it_is_the_network(monkeypatch):
    torch.manual_seed(0)
    model, x = trained(cifar_resnet(8)), images(3, 8)
    FoldedResNet(model, torch.float32)(x)  # the first time kernels are rehearsed
    launched, forward = [], (own := pytest.importorskip("smoothout.lab.models.ghost_conv_kernels")).forward
    monkeypatch.setattr(own, "forward", lambda *operands: (launched.append(operands), forward(*operands))[1])
    found = FoldedResNet(model, torch.float32)(x)
    assert len(launched) == sum(isinstance(module, nn.Conv2d) for module in model.modules())
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4)
    assert not found.requires_grad


@needs_kernels
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("outputs", "stride"), [(16, 1), (24, 2)])
def test_a_layer_is_rounded_once(outputs, stride, residual, relu):
    torch.manual_seed(0)
    x = torch.randn(3, 16, 6, 5, device=DEVICE).half().to(memory_format=torch.channels_last)
    weight = (0.1 * torch.randn(outputs, 16, 3, 3, device=DEVICE)).half().to(memory_format=torch.channels_last)
    shift = torch.randn(outputs, device=DEVICE)
    exact = nn.functional.conv2d(x.float(), weight.float(), shift, stride=stride, padding=1)
    around = torch.randn_like(exact).half() if residual else None
    exact = exact if around is None else exact + around.float()
    exact = exact.relu() if relu else exact
    found = folded.convolve(x, weight, shift, stride, 1, around, relu)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), exact, rtol=2e-3, atol=2e-3)
    assert folded.convolve(x * torch.nan, weight, shift, stride, 1, around, relu).isnan().all()


def test_it_follows_the_weights_and_leaves_them(monkeypatch):
    monkeypatch.setenv("SMOOTHOUT_KERNELS", "foreach")
    model, x = trained(cifar_resnet(8)), images(2, 8)
    network = FoldedResNet(model, torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.testing.assert_close(network(x), model(x), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_evaluation_may_compute_with_another_network():
    model = trained(cifar_resnet(8))
    batches = [(images(4, 8), torch.randint(10, (4,), device=DEVICE)) for _ in range(2)]
    model.train()
    found = in_numbers(evaluated(model, batches, network=FoldedResNet(model, torch.float32)))
    assert model.training
    expected = evaluate(model, batches)
    assert (found.loss, found.accuracy) == pytest.approx((expected.loss, expected.accuracy), rel=1e-4)


def test_there_is_none_where_it_would_not_be_quicker():
    settings = {"dataset": "cifar10", "model": "resnet20", "amp": "bf16", "channels_last": True}
    assert quick_network(resolve(**settings), cifar_resnet(8)) is None  # on a CPU


@pytest.mark.gpu
@needs_cuda
def test_on_cuda_it_judges_as_the_network_does():
    settings = {"dataset": "cifar10", "model": "resnet20", "channels_last": True}
    torch.manual_seed(0)
    model, config = trained(cifar_resnet(20)), resolve(**settings, amp="bf16")
    network = quick_network(config, model)
    assert isinstance(network, FoldedResNet)
    assert quick_network(resolve(**settings), model) is None  # in full precision
    x = images(512, 32)
    with torch.no_grad():
        exact = model(x)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            usual, quick = model(x).float(), network(x).float()
    assert (quick - exact).norm() <= 1.5 * (usual - exact).norm()
