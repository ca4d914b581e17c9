"""The fused kernels: on a CPU in Triton's interpreter, and with the method's property suite on CUDA where there is one.

Triton decides when it is imported whether it interprets. So `test_in_the_interpreter` runs this file once more, in a
process of its own, and `test_fused.py` too; the tests below it run only there or on CUDA.
"""

from pathlib import Path

import pytest
import torch

from interpreter import DEVICE, needs_cuda, needs_kernels, outside_the_interpreter, passes_in_the_interpreter, python
from kernel_cases import (
    TENSORS,
    assert_equal,
    kernels_for,
    noise_of,
    philox,
    rounded,
    weights,
)
from smoothout import Gaussian, Rademacher, Uniform, filters
from smoothout.filters import FilterLayout

HERE = Path(__file__).parent
SUITE = ["test_perturb.py", "test_smooth.py", "test_attach.py", "test_ensemble.py"]
# About foreach's blocks and order of elements, or the CPU by name.
NOT_OF_THE_KERNELS = (
    "not test_blocks_cover and not test_memory_format_does_not_change_the_noise "
    "and not test_a_state_of_another_model_or_generator_is_noticed"
)
LAUNCHES = [{}, {"tile": 1024, "warps": 2}, {"tile": 4096}]
ON_CUDA = "import sys, torch, pytest; torch.set_default_device('cuda'); sys.exit(pytest.main(sys.argv[1:]))"


@outside_the_interpreter
def test_in_the_interpreter():
    passes_in_the_interpreter(__file__, HERE / "test_fused.py")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("file", SUITE)
def test_the_property_suite_on_cuda(file):
    assert "passed" in python("-c", ON_CUDA, str(HERE / file), "-k", NOT_OF_THE_KERNELS)


def test_importing_smoothout_does_not_import_triton():
    python(
        "-c", "import sys, smoothout; assert not {'triton', 'smoothout.fused', 'smoothout.kernels'} & set(sys.modules)"
    )


# ---- the noise -------------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize(("noise", "variance"), [(Uniform(), 1 / 3), (Gaussian(), 1.0), (Rademacher(), 1.0)], ids=str)
def test_mean_variance_and_independence_also_of_every_lane(noise, variance):
    """Four values come out of one Philox call."""
    values = noise_of([torch.zeros(40, 1000, device=DEVICE)], noise=noise, layouts=[FilterLayout(0)])[0].double()
    lanes = values.flatten().view(-1, 4)
    for part in (values, *lanes.unbind(1)):
        fourth = 3.0 if isinstance(noise, Gaussian) else 1.0  # E n⁴, or more
        assert abs(part.mean()) < 5 * (variance / part.numel()) ** 0.5
        assert abs(part.square().mean() - variance) <= 5 * ((fourth - variance**2) / part.numel()) ** 0.5
    assert (torch.corrcoef(lanes.T) - torch.eye(4, device=DEVICE)).abs().max() < 5 / len(lanes) ** 0.5
    if isinstance(noise, Rademacher):
        assert set(values.unique().tolist()) == {-1.0, 1.0}
    else:
        law = (lambda x: (x + 1) / 2) if isinstance(noise, Uniform) else torch.special.ndtr
        steps = torch.linspace(0, 1, values.numel(), dtype=torch.float64, device=DEVICE)
        distance = (law(values.flatten().sort().values) - steps).abs().max()
        assert distance * values.numel() ** 0.5 < 1.95  # Kolmogorov–Smirnov at 0.1 %
    if isinstance(noise, Uniform):
        assert values.abs().max() < 1
        assert values.abs().min() > 0


@needs_kernels
def test_the_numbers_are_the_same_on_every_device():
    """Written out: a key and two words from (seed; step, draw, replica), then the words of (index / 4, parameter)."""
    seed, step, draw, number, replica = 12345678901234567, 2**33 + 7, 5, 3, 2
    layouts, position = [FilterLayout(0)], {"seed": seed, "step": step, "draw": draw}
    values = noise_of([torch.zeros(3, 7, device=DEVICE)], layouts=layouts, number=number, replica=replica, **position)
    high, low, salt, pepper = philox(seed, (step % 2**32, step >> 32, draw, replica))
    words = [w for quad in range(6) for w in philox(high << 32 | low, (quad, number, salt, pepper), 7)]
    expected = [(2 * (w % 2**23) + 1 - 2**23) / 2**23 for w in words[:21]]
    assert values[0].flatten().tolist() == expected
    assert philox(0, (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)  # the authors' own test vector


@needs_kernels
@pytest.mark.parametrize("noise", [Uniform(), Gaussian()], ids=str)
def test_the_launch_shape_does_not_change_the_noise(noise):
    tensors = weights()
    first, *others = (noise_of(tensors, noise=noise, launch=launch) for launch in LAUNCHES)
    for other in others:
        assert_equal(first, other)


@needs_kernels
def test_the_launch_shape_does_not_change_noise_scaled_by_filters():
    tensors = weights()
    scaled = [noise_of(tensors, noise=Gaussian(), scale=filters.Filter(), launch=launch) for launch in LAUNCHES]
    for one, *rest in zip(*scaled):
        for other in rest:
            torch.testing.assert_close(one, other, rtol=3e-6, atol=0)


@needs_kernels
def test_seed_step_draw_replica_and_parameter_each_change_the_noise():
    tensors = [torch.zeros(4, 8, device=DEVICE)]
    layouts = [FilterLayout(0)]
    base, again = noise_of(tensors, layouts=layouts), noise_of(tensors, layouts=layouts)
    assert_equal(base, again)
    for change in ({"seed": 2}, {"seed": -(2**63)}, {"step": 1}, {"step": 2**40}, {"draw": 1}, {"replica": 1}):
        assert (noise_of(tensors, layouts=layouts, **change)[0] != base[0]).all(), change
    assert (noise_of(tensors, layouts=layouts, number=1)[0] != base[0]).all()


def in_memory_order(tensor):
    """Its rows as they lie in memory: a contiguous tensor with the shape of the permuted one."""
    order = sorted(range(1, tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(0, *order)


@needs_kernels
@pytest.mark.parametrize("scale", [filters.Absolute(), filters.Weight(), filters.Filter()], ids=str)
@pytest.mark.parametrize(
    "shape", [(6, 4, 3, 3), (5, 3, 3, 3), (2, 140, 3, 3), (2, 3, 2, 2, 3), (2, 8, 4, 3, 3)], ids=str
)
def test_a_channels_last_weight_has_the_noise_of_a_contiguous_one_in_the_order_of_memory(shape, scale):
    plain = torch.randn(shape, device=DEVICE)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = plain.contiguous(memory_format=formats[plain.ndim])
    assert not last.is_contiguous()
    twin = in_memory_order(last)
    assert twin.is_contiguous()
    layouts = [FilterLayout(0, clean_row=1)]
    theta = noise_of([last], scale=scale, layouts=layouts)[0]
    assert theta.stride() == last.stride()
    (of_twin,) = noise_of([twin], scale=scale, layouts=layouts)
    # Norms of odd filters are added up in another order.
    torch.testing.assert_close(in_memory_order(theta), of_twin, rtol=1e-6 if shape == (5, 3, 3, 3) else 0, atol=0)
    assert (theta[1] == 0).all()
    part = last[1:].clone(memory_format=torch.preserve_format)  # a shard
    assert_equal(noise_of([part], scale=scale, layouts=layouts, first_row=1), [theta[1:]])
    fused = kernels_for([last], scale=scale, layouts=layouts)
    fused.set_position(1, 0, 1.0)
    copies = [torch.empty_like(last, dtype=torch.bfloat16)]
    fused.draw_into(copies)
    assert_equal(copies, [rounded(last + theta, torch.bfloat16)])
    before = last.clone()
    fused.apply()
    assert_equal([last], [before + theta])
    fused.restore()
    assert_equal([last], [before])


@needs_kernels
def test_strides_that_leave_gaps_or_turn_rows_do_not_change_the_noise():
    plain = [torch.randn(5, 12, device=DEVICE), torch.randn(8, 4, 3, device=DEVICE)]
    shuffled = [
        torch.zeros(24, 10, device=DEVICE).t()[::2, ::2].copy_(plain[0]),
        torch.zeros(3, 8, 4, device=DEVICE).permute(1, 2, 0).copy_(plain[1]),
    ]
    layouts = [FilterLayout(0)] * 2
    assert_equal(noise_of(plain, layouts=layouts), noise_of(shuffled, layouts=layouts))
    scaled = {"scale": filters.Filter(), "layouts": layouts}
    for one, other in zip(noise_of(plain, **scaled), noise_of(shuffled, **scaled)):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


@needs_kernels
def test_raw_noise_is_that_of_the_scaled_draw_also_for_transposed_channels_last():
    w = torch.randn(6, 5, 3, 3, device=DEVICE).contiguous(memory_format=torch.channels_last)
    layout = FilterLayout(1, groups=2)
    raw, scaled = (noise_of([w], layouts=[layout], scale=s)[0] for s in (filters.Absolute(), filters.Filter()))
    expected = raw * (filters.filter_norms(w, layout) / filters.filter_norms(raw, layout))
    torch.testing.assert_close(scaled, expected, rtol=1e-6, atol=0)


@needs_kernels
@pytest.mark.parametrize("shape", [(12, 8), (11, 7)], ids=str)
def test_rows_of_a_shard_get_the_noise_of_the_whole(shape):
    whole = torch.randn(shape, device=DEVICE)
    expected = noise_of([whole], layouts=[FilterLayout(0, clean_row=6)])[0]
    assert (expected == 0).all(1).tolist() == [row == 6 for row in range(shape[0])]
    for start in (0, 5, 7):
        rows = whole[start : start + 4].clone()
        assert_equal(noise_of([rows], layouts=[FilterLayout(0, clean_row=6)], first_row=start), [expected[start:][:4]])


@needs_kernels
@pytest.mark.parametrize(("noise", "epsilon"), [(Uniform(), 0.0), (Gaussian(), 0.0), (Rademacher(), 1e-2)], ids=str)
def test_filter_scaling_of_the_same_raw_draw(noise, epsilon):
    tensors = weights()
    tensors[0][1] = 0.0  # a filter of zeros takes no noise
    raw = noise_of(tensors, noise=noise)
    scaled = noise_of(tensors, strength=0.3, noise=noise, scale=filters.Filter(epsilon))
    for (name, (_, layout)), w, n, theta in zip(TENSORS.items(), tensors, raw, scaled):
        expected = n * (0.3 * filters.filter_norms(w, layout) / (filters.filter_norms(n, layout) + epsilon + 1e-30))
        torch.testing.assert_close(theta, expected, rtol=1e-6, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@needs_kernels
def test_weight_scaling_and_sign():
    tensors = weights()
    raw = noise_of(tensors)
    assert_equal(noise_of(tensors, strength=0.3, scale=filters.Weight()), [n * w * 0.3 for n, w in zip(raw, tensors)])
    fused = kernels_for(tensors)
    fused.set_position(1, 0, 0.5)
    before = [w.clone() for w in tensors]
    fused.apply(sign=-1.0)
    assert_equal(tensors, [w - 0.5 * n for w, n in zip(before, raw)])
