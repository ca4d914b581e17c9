"""Our max-pooling is torch's: in Triton's interpreter here, on CUDA where there is one."""

import pytest
import torch
from torch.nn import functional as F

from interpreter import DEVICE, needs_cuda, needs_kernels, outside_the_interpreter, passes_in_the_interpreter
from smoothout.lab.models.pooling import MaxPool, _Pool

CASES = [((3, 2), (2, 8, 9, 9), 0), ((3, 2), (1, 3, 8, 7), 1), ((2, 2), (3, 5, 6, 6), 0), ((3, 1), (2, 4, 5, 5), 1)]


@outside_the_interpreter
def test_in_the_interpreter():
    passes_in_the_interpreter(__file__)


def images(shape, dtype=torch.float32):
    torch.manual_seed(0)
    # Few values, so that windows have several largest.
    return torch.randint(-3, 3, shape).to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("window", "shape", "padding"), CASES)
def test_values_and_gradients_are_those_of_torch(window, shape, padding, dtype):
    x = images(shape, dtype).requires_grad_()
    y = MaxPool(*window, padding)(x)
    assert "_Pool" in str(y.grad_fn)
    assert y.is_contiguous(memory_format=torch.channels_last)
    # The reference on contiguous images: there torch takes the first of equals by definition.
    reference = x.detach().contiguous().float().requires_grad_()
    expected = F.max_pool2d(reference, *window, padding)
    dy = torch.randn(y.shape).to(DEVICE, dtype)
    y.backward(dy)
    expected.backward(dy.float())
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=0)
    torch.testing.assert_close(x.grad.float(), reference.grad, rtol=1e-2 if dtype != torch.float32 else 1e-6, atol=1e-6)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("size", [32, 15])
def test_at_the_shapes_of_c1_it_is_torchs(size):
    x = images((513, 64, size, size), torch.bfloat16).requires_grad_()
    y, expected = MaxPool(3, 2)(x), F.max_pool2d(x.detach().contiguous().requires_grad_(), 3, 2)
    assert torch.equal(y, expected)
    dy = torch.randn_like(y)
    reference = x.detach().float().contiguous().requires_grad_()
    F.max_pool2d(reference, 3, 2).backward(dy.float().contiguous())
    y.backward(dy)
    torch.testing.assert_close(x.grad.float(), reference.grad, rtol=1e-2, atol=1e-2)


@needs_kernels
def test_nan_goes_through_as_in_torch():
    x = images((1, 4, 5, 5))
    x[0, 1, 2, 2] = float("nan")
    torch.testing.assert_close(MaxPool(3, 2)(x), F.max_pool2d(x.contiguous(), 3, 2), equal_nan=True)


@needs_kernels
def test_second_derivatives_are_those_of_torch():
    x = images((2, 4, 7, 7)).requires_grad_()
    weights = torch.randn(2, 4, 3, 3, device=DEVICE)

    def product(pool, x):
        (gradient,) = torch.autograd.grad((pool(x) ** 3 * weights).sum(), x, create_graph=True)
        return torch.autograd.grad((gradient * torch.arange(x.numel(), device=DEVICE).view_as(x)).sum(), x)[0]

    found = product(MaxPool(3, 2), x)
    expected = product(lambda x: F.max_pool2d(x, 3, 2), x.detach().contiguous().requires_grad_())
    torch.testing.assert_close(found, expected)


def test_elsewhere_it_is_torchs_own():
    x = torch.randn(1, 2, 8, 8, dtype=torch.float64, requires_grad=True)
    for pool, window in ((MaxPool(3, 2), {}), (MaxPool(2, 2, dilation=2), {"dilation": 2})):
        y = pool(x)
        assert y.grad_fn.name().startswith("MaxPool2DWithIndices")
        assert torch.equal(y, F.max_pool2d(x, pool.kernel_size, pool.stride, **window))
    assert not issubclass(_Pool, torch.nn.Module)


def test_what_a_byte_cannot_hold_and_what_torch_alone_knows_is_left_to_torch():
    assert MaxPool(16, 2)._window == (16, 2, 0)
    assert MaxPool(17, 2)._window == ()
    assert MaxPool(3, 2, padding=2)._window == ()
    assert MaxPool(3, 2, return_indices=True)._window == ()
    assert MaxPool((3, 3), 2)._window == ()
