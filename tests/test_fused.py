"""What the fused kernels write, from tensors and from SmoothOut; run in Triton's interpreter by `test_kernels.py`."""

import pytest
import torch
from torch import nn

from interpreter import DEVICE, needs_cuda, needs_kernels
from kernel_cases import assert_equal, kernels_for, noise_of, rounded, weights
from smoothout import AdaSmoothOut, Bernoulli, Gaussian, Rademacher, SmoothOut, Uniform, filters
from smoothout.filters import FilterLayout


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, filters.Filter()), (torch.bfloat16, filters.Filter()), (torch.float16, filters.Absolute())],
    ids=str,
)
def test_apply_adds_the_noiserounded_once_and_restore_is_exact(dtype, scale):
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
    assert_equal(tensors, [rounded(w.float() + t, dtype) for w, t in zip(before, theta)])
    assert_equal(copies, tensors)
    fused.restore()
    assert_equal([w.view(torch.uint8) for w in tensors if w.ndim], [w.view(torch.uint8) for w in before if w.ndim])


@needs_kernels
@pytest.mark.parametrize(
    ("noise", "scale"),
    [
        (Uniform(), filters.Absolute()),
        (Uniform(), filters.Weight()),
        (Uniform(), filters.Filter()),
        (Gaussian(), filters.Filter()),
        (Rademacher(), filters.Absolute()),
    ],
    ids=str,
)
def test_destinations_of_another_dtype_get_the_sumrounded_once(noise, scale):
    tensors = weights()
    fused = kernels_for(tensors, noise=noise, scale=scale)
    fused.set_position(7, 3, 0.1)
    theta = fused.noise(2)
    sums = [w + t for w, t in zip(tensors, theta)]
    opposite = [w - t for w, t in zip(tensors, theta)]
    copies = [torch.empty_like(w, dtype=torch.bfloat16) for w in tensors]
    fused.draw_into(copies, 2)
    assert_equal(copies, [rounded(s, torch.bfloat16) for s in sums])
    copies = [torch.empty_like(w, dtype=torch.float16) for w in tensors]
    fused.draw_into(copies, 2, sign=-1.0)
    assert_equal(copies, [s.half() for s in opposite])
    fused.draw_into(copies, 2, sign=0.0)  # a pass at clean weights beside noisy ones
    assert_equal(copies, [w.half() for w in tensors])
    with pytest.raises(ValueError, match="have several"):
        fused.draw_into([copies[0].float(), *copies[1:]])


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
    model = nn.ParameterList(nn.Parameter(torch.randn(3, i + 1, device=DEVICE)) for i in range(12))
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
@pytest.mark.parametrize("scale", ["absolute", "filter", "weight"])
def test_draw_into_the_weights_themselves(scale):
    """Noise that stays; filters longer than what a program holds at once are looked at twice."""
    model = nn.ParameterList(nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in ((3, 5000), (4, 6)))
    smooth = SmoothOut(model, strength=0.1, scale=scale)
    p = smooth._perturbation
    with smooth.perturbed():
        expected = [w.detach().clone() for w in p.local_weights]
    p.set_position(0.1, 0)
    p.draw_into([w.detach() for w in p.local_weights])
    assert_equal(p.local_weights, expected)


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


@needs_kernels
def test_weights_that_share_memory_are_left_to_the_plain_path():
    """One launch backs up and adds: of two on the same memory one would back up the other's noise."""
    first, second = (nn.Linear(8, 8, bias=False, device=DEVICE) for _ in range(2))
    second.weight = nn.Parameter(first.weight.data)
    before = first.weight.detach().clone()
    smooth = SmoothOut(nn.Sequential(first, second), strength=0.1)
    assert smooth.perturbation.generator_kind != "fused"
    with smooth.perturbed():
        assert not torch.equal(first.weight, before)
    assert torch.equal(first.weight, before)
    second.weight = nn.Parameter(second.weight.detach().clone())
    with smooth.perturbed():
        assert smooth.perturbation.generator_kind == "fused"
    assert torch.equal(first.weight, before)
