"""The fused kernels: on a CPU in Triton's interpreter, and with the method's property suite on CUDA where there is one.

Triton decides when it is imported whether it interprets. So `test_in_the_interpreter` runs this file once more, in a
process of its own; the tests below it run only there or on CUDA.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from smoothout import AdaSmoothOut, Bernoulli, Gaussian, Rademacher, SmoothOut, Uniform, filters
from smoothout.filters import FilterLayout

HERE = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
needs_kernels = pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="neither CUDA nor the interpreter here")
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")

SUITE = ["test_perturb.py", "test_smooth.py", "test_attach.py", "test_ensemble.py"]
# About foreach's blocks and order of elements, or the CPU by name.
NOT_OF_THE_KERNELS = (
    "not test_blocks_cover and not test_memory_format_does_not_change_the_noise "
    "and not test_a_state_of_another_model_or_generator_is_noticed"
)
ON_CUDA = "import sys, torch, pytest; torch.set_default_device('cuda'); sys.exit(pytest.main(sys.argv[1:]))"


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=HERE, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed; it interprets on a CPU too: pip install triton")
    environment = {"TRITON_INTERPRET": "1", "SMOOTHOUT_KERNELS": "fused"}
    output = run("-m", "pytest", Path(__file__).name, "-m", "not gpu", **environment)
    assert "passed" in output


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("file", SUITE)
def test_the_property_suite_on_cuda(file):
    assert "passed" in run("-c", ON_CUDA, file, "-k", NOT_OF_THE_KERNELS)


def test_importing_smoothout_does_not_import_triton():
    run("-c", "import sys, smoothout; assert not {'triton', 'smoothout.fused', 'smoothout.kernels'} & set(sys.modules)")


# ---- cases -----------------------------------------------------------------------------------------------------------

# Every way that the kernels have to do a part: (shape, layout).
TENSORS = {
    "narrow filters": ((9, 12), FilterLayout(0)),
    "filters of a few hundred": ((5, 300), FilterLayout(0)),
    "filters of a thousand": ((2, 1200), FilterLayout(0)),
    "filters beyond a tile": ((1, 3000), FilterLayout(0)),
    "odd filters": ((7, 27), FilterLayout(0)),
    "large odd filters": ((2, 701), FilterLayout(0)),
    "biases": ((10,), FilterLayout("element")),
    "a scalar": ((), FilterLayout("element")),
    "columns": ((20, 6), FilterLayout(1)),
    "transposed, in groups": ((8, 6, 3, 3), FilterLayout(1, groups=2)),
    "with a clean row": ((6, 8), FilterLayout(0, clean_row=2)),
    "empty": ((0, 4), FilterLayout(0)),
}


def weights(dtype=torch.float32):
    return [torch.randn(shape, device=DEVICE).to(dtype) for shape, _ in TENSORS.values()]


def kernels_for(tensors, noise=None, scale=None, layouts=None, launch=None, **numbers):
    from smoothout.fused import Fused, can_fuse
    from smoothout.tables import Launch, Part

    noise, scale = noise or Uniform(), scale or filters.Absolute()
    layouts = layouts or [layout for _, layout in TENSORS.values()]
    parts = [
        Part(w, torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device=w.device), layout, i, 0, 0)
        for i, (w, layout) in enumerate(zip(tensors, layouts))
    ]
    parts = [Part(**(part.__dict__ | numbers)) for part in parts]
    assert can_fuse(parts, noise)
    return Fused(parts, noise, scale, Launch(**launch or {}))


def noise_of(tensors, strength=1.0, seed=1, step=0, draw=0, **others):
    fused = kernels_for(tensors, **others)
    fused.set_position(seed, step, strength)
    return fused.noise(draw)


def assert_equal(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one, other)


def philox(key, counter, rounds=10):
    """Philox 4×32 (Salmon et al., 2011) in Python's integers."""
    k0, k1, (c0, c1, c2, c3) = key % 2**32, key >> 32, counter
    for _ in range(rounds):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b % 2**32, (a >> 32) ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


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
    launches = [{}, {"tile": 1024, "warps": 2}, {"tile": 4096, "cache": "streaming", "hold": True}]
    first, *others = (noise_of(tensors, noise=noise, launch=launch) for launch in launches)
    for other in others:
        assert_equal(first, other)
    scaled = [noise_of(tensors, noise=noise, scale=filters.Filter(), launch=launch) for launch in launches]
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
    assert_equal(copies, [_rounded(last + theta, torch.bfloat16)])
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


# ---- what is written -------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, filters.Filter()), (torch.bfloat16, filters.Filter()), (torch.float16, filters.Absolute())],
    ids=str,
)
def test_apply_adds_the_noise_rounded_once_and_restore_is_exact(dtype, scale):
    tensors = weights(dtype)
    tensors[0].view(-1)[0] = -0.0
    tensors[3] = torch.zeros(3001, device=DEVICE, dtype=dtype)[1:].view(1, 3000).copy_(tensors[3])  # misaligned
    before = [w.clone() for w in tensors]
    fused = kernels_for(tensors, scale=scale)
    fused.set_position(7, 3, 0.1)
    theta = fused.noise(2)
    copies = [torch.empty_like(w) for w in tensors]
    fused.draw_into(copies, 2)
    assert_equal(tensors, before)
    fused.apply(2)
    assert_equal(tensors, [_rounded(w.float() + t, dtype) for w, t in zip(before, theta)])
    assert_equal(copies, tensors)
    fused.restore()
    assert_equal([w.view(torch.uint8) for w in tensors if w.ndim], [w.view(torch.uint8) for w in before if w.ndim])


@needs_kernels
@pytest.mark.parametrize("scale", [filters.Absolute(), filters.Weight(), filters.Filter()], ids=str)
@pytest.mark.parametrize("noise", [Uniform(), Gaussian(), Rademacher()], ids=str)
def test_destinations_of_another_dtype_get_the_sum_rounded_once(noise, scale):
    tensors = weights()
    fused = kernels_for(tensors, noise=noise, scale=scale)
    fused.set_position(7, 3, 0.1)
    sums = [w + t for w, t in zip(tensors, fused.noise(2))]
    opposite = [w - t for w, t in zip(tensors, fused.noise(2))]
    copies = [torch.empty_like(w, dtype=torch.bfloat16) for w in tensors]
    fused.draw_into(copies, 2)
    assert_equal(copies, [_rounded(s, torch.bfloat16) for s in sums])
    copies = [torch.empty_like(w, dtype=torch.float16) for w in tensors]
    fused.draw_into(copies, 2, sign=-1.0)
    assert_equal(copies, [s.half() for s in opposite])
    with pytest.raises(ValueError, match="have several"):
        fused.draw_into([copies[0].float(), *copies[1:]])


def _rounded(values, dtype):
    if INTERPRETED and dtype is torch.bfloat16:  # the interpreter cuts off where the hardware rounds
        return (values.view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)
    return values.to(dtype)


@needs_kernels
@pytest.mark.parametrize(("seed", "step"), [(-1, 0), (-(2**63), 2**33 + 1), (2**62 + 5, 2**31)])
def test_a_position_in_arguments_is_that_in_memory_and_stays_there(seed, step):
    tensors = [torch.randn(4, 8, device=DEVICE)]
    fused = kernels_for(tensors, layouts=[FilterLayout(0)])
    fused.at(seed, step, 0.3)
    given = fused.noise(1)
    assert_equal(given, noise_of(tensors, strength=0.3, seed=seed, step=step, draw=1, layouts=[FilterLayout(0)]))
    fused.advance()
    expected = noise_of(tensors, strength=0.3, seed=seed, step=step + 1, draw=1, layouts=[FilterLayout(0)])
    assert_equal(fused.noise(1), expected)


@needs_kernels
def test_advance_goes_to_the_next_step():
    tensors = weights()
    fused = kernels_for(tensors)
    fused.set_position(7, 3, 0.1)
    fused.advance()
    assert_equal(fused.noise(1), noise_of(tensors, strength=0.1, seed=7, step=4, draw=1))


@needs_kernels
def test_a_restore_before_the_draw_writes_nothing():
    """An interrupt may come between the two: the backups are not there yet."""
    tensors = weights()
    before = [w.clone() for w in tensors]
    fused = kernels_for(tensors)
    for step in range(3):
        (fused.set_position if step == 1 else fused.at)(0, step, 1.0)
        fused.restore()
        assert_equal(tensors, before)
        fused.apply()
        fused.restore()
        assert_equal(tensors, before)
        for w in tensors:
            w.add_(1.0)
        before = [w.clone() for w in tensors]


@needs_kernels
def test_many_tensors_take_one_launch_each_way(monkeypatch):
    from smoothout.fused import Fused

    launches = []
    launch = Fused._launch
    monkeypatch.setattr(Fused, "_launch", lambda self, *a, **k: (launches.append(a[0]), launch(self, *a, **k)))
    model = nn.ParameterList(nn.Parameter(torch.randn(3, i + 1, device=DEVICE)) for i in range(40))
    smooth = AdaSmoothOut(model)
    assert smooth._perturbation.generator_kind == "fused"
    before = [p.detach().clone() for p in model]
    versions = [p._version for p in model]
    launches.clear()
    with smooth.perturbed():
        assert len(launches) == 1
        assert not any(torch.equal(p, b) for p, b in zip(model, before))
        assert all(p._version > v for p, v in zip(model, versions))  # autograd notices
        versions = [p._version for p in model]
    assert len(launches) == 2
    assert all(p._version > v for p, v in zip(model, versions))
    assert_equal(model, before)


@needs_kernels
def test_draw_into_gives_the_weights_that_perturbed_has():
    model = nn.Linear(6, 5, device=DEVICE)
    smooth = AdaSmoothOut(model)
    p = smooth._perturbation
    p.set_position(smooth.current_strength, 0)
    copies = [torch.empty_like(w) for w in p.local_weights]
    p.draw_into(copies)
    with smooth.perturbed():
        assert_equal(copies, p.local_weights)
    p.set_position(0.1, 4)
    p.advance()
    p.draw_into(copies, 1, sign=-1.0)
    assert_equal(copies, [w - t for w, t in zip(p.local_weights, p.draw(0.1, 5, 1))])
    with pytest.raises(ValueError, match="destination needs its weight's shape"):
        p.draw_into([torch.empty(6, 5, device=DEVICE), copies[1]])


@needs_kernels
def test_what_the_kernels_cannot_do_foreach_does(monkeypatch):
    model = nn.Linear(6, 5, device=DEVICE)
    others = [
        SmoothOut(nn.Linear(6, 5, device=DEVICE).double()),
        SmoothOut(model, noise=Bernoulli(0.5), scale="weight"),
        SmoothOut(nn.ParameterList([nn.Parameter(torch.randn(4, 1, device=DEVICE).expand(4, 3))])),
    ]
    assert [s._perturbation.generator_kind for s in others] == [DEVICE] * 3
    assert SmoothOut(model)._perturbation.generator_kind == "fused"
    monkeypatch.setenv("SMOOTHOUT_KERNELS", "foreach")
    assert SmoothOut(model)._perturbation.generator_kind == DEVICE


# ---- CUDA graphs and streams -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_cuda
def test_a_captured_graph_draws_the_next_steps_noise_at_every_replay():
    model = nn.Linear(32, 32, device="cuda")
    smooth, plain = AdaSmoothOut(model), AdaSmoothOut(model)
    seen = torch.empty_like(model.weight)
    expected = []
    for _ in range(5):
        with plain.perturbed():
            expected.append(model.weight.detach().clone())
    before = model.weight.detach().clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # step 0: warm-up
        with smooth.perturbed():
            seen.copy_(model.weight.detach())
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(seen, expected[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with smooth.perturbed():
            seen.copy_(model.weight.detach())
    for step in range(1, 5):
        graph.replay()
        assert torch.equal(seen, expected[step])
        assert torch.equal(model.weight, before)


@pytest.mark.gpu
@needs_cuda
def test_nothing_waits_for_the_device():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).cuda().to(memory_format=torch.channels_last)
    for smooth in (SmoothOut(model), AdaSmoothOut(model, noise="gaussian")):
        with smooth.perturbed():
            pass
        torch.cuda.set_sync_debug_mode("error")
        try:
            with smooth.samples(3) as draws:
                for _ in draws:
                    pass
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@needs_cuda
def test_a_captured_graph_advances_and_draws_into_bf16():
    model = nn.Linear(32, 32, device="cuda")
    p, twin = (AdaSmoothOut(model)._perturbation for _ in range(2))
    copies = [torch.empty_like(w, dtype=torch.bfloat16) for w in p.local_weights]
    p.set_position(0.2, 6)
    p.draw_into(copies)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        p.advance()
        p.draw_into(copies, 1, sign=-1.0)
    for step in (7, 8, 9):
        graph.replay()
        assert_equal(copies, [(w - t).bfloat16() for w, t in zip(p.local_weights, twin.draw(0.2, step, 1))])


@pytest.mark.gpu
@needs_cuda
def test_draws_on_parallel_streams():
    model = nn.Linear(64, 64, device="cuda")
    p = AdaSmoothOut(model)._perturbation
    p.set_position(0.2, 3)
    streams = [torch.cuda.Stream() for _ in range(4)]
    copies = [[torch.empty_like(w) for w in p.local_weights] for _ in streams]
    for draw, (stream, mine) in enumerate(zip(streams, copies)):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            p.draw_into(mine, draw)
    torch.cuda.synchronize()
    for draw, mine in enumerate(copies):
        assert_equal(mine, [w + t for w, t in zip(p.local_weights, p.draw(0.2, 3, draw))])
