"""Exactness: whatever happens inside, the weights come back bit for bit, in the same storage."""

import copy
import pickle
import signal
import threading
import types
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call
from torch.optim.optimizer import _global_optimizer_post_hooks

from cases import CASES, DTYPES, assert_moved, assert_same, each_case, snapshot
from smoothout import AdaSmoothOut, Bernoulli, Gaussian, SmoothOut, Uniform
from smoothout.blocks import overlap
from smoothout.perturb import Perturbation
from smoothout.witness import Witness


def leave_normally(smooth, check):
    with smooth.perturbed():
        check()


def leave_by_exception(smooth, check):
    with pytest.raises(ZeroDivisionError), smooth.perturbed():
        check()
        raise ZeroDivisionError


def leave_by_interrupt(smooth, check):
    with pytest.raises(KeyboardInterrupt), smooth.perturbed():
        check()
        signal.raise_signal(signal.SIGINT)


def leave_by_second_enter(smooth, check):
    with pytest.raises(RuntimeError, match="does not nest"), smooth.perturbed():
        check()
        with smooth.perturbed():
            pass


def leave_samples(smooth, check):
    with smooth.samples(3) as draws:
        for _ in draws:
            check()


def leave_samples_early(smooth, check):
    with smooth.samples(4, antithetic=True) as draws:
        for i in draws:
            check()
            if i == 1:
                break


def leave_samples_by_exception(smooth, check):
    with pytest.raises(KeyboardInterrupt), smooth.samples(3) as draws:
        for i in draws:
            check()
            if i == 1:
                raise KeyboardInterrupt


WAYS_OUT = (
    leave_normally,
    leave_by_exception,
    leave_by_interrupt,
    leave_by_second_enter,
    leave_samples,
    leave_samples_early,
    leave_samples_by_exception,
)


@each_case
@settings(max_examples=12, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    way_out=st.sampled_from(WAYS_OUT),
    scale=st.sampled_from(["absolute", "filter", "weight"]),
    noise=st.sampled_from(["uniform", "gaussian", "rademacher"]),
    strength=st.floats(0.05, 10.0),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_every_way_out_restores_exactly(case, dtype, way_out, scale, noise, strength, seed):
    model = case.build().to(dtype)
    for p in model.parameters():  # tensors of zeros take no filter-scaled noise; −0.0 must come back as −0.0
        nn.init.normal_(p)
        p.data.view(-1)[0] = -0.0
    smooth = SmoothOut(model, strength, noise=noise, scale=scale, seed=seed)
    assert len(smooth._perturbation.selected) == case.perturbed
    before = snapshot(model)
    way_out(smooth, lambda: assert_moved(model, before, smooth))
    assert_same(model, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_channels_last_and_strided_parameters_restore_exactly(dtype):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)).to(dtype).to(memory_format=torch.channels_last)
    model.extra = nn.Parameter(torch.randn(6, 10, dtype=dtype).t()[::2])
    assert not model.extra.is_contiguous()
    before = snapshot(model)
    smooth = AdaSmoothOut(model)
    with smooth.perturbed():
        assert_moved(model, before, smooth)
    assert_same(model, before)


def test_memory_format_does_not_change_the_noise():
    model = nn.Conv2d(3, 8, 3)
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    with SmoothOut(model).perturbed(), SmoothOut(other).perturbed():
        assert torch.equal(model.weight, other.weight)
    with AdaSmoothOut(model).perturbed(), AdaSmoothOut(other).perturbed():  # norms add up in another order
        torch.testing.assert_close(model.weight, other.weight, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", [SmoothOut, AdaSmoothOut])
def test_weights_that_share_memory_restore_exactly(kind):
    """Not tied, which is one parameter under two names, but two parameters on the same memory, in several blocks."""
    first, second, third = (nn.Linear(800, 800, bias=False) for _ in range(3))
    second.weight = nn.Parameter(first.weight.data)
    third.weight = nn.Parameter(first.weight.data[100:300])
    model = nn.Sequential(first, nn.Linear(800, 700), second, third)
    before = [p.detach().clone() for p in model.parameters()]
    smooth = kind(model, strength=0.1)
    for _ in range(2):
        with smooth.perturbed():
            assert not torch.equal(first.weight, before[0])
        assert all(map(torch.equal, model.parameters(), before))
    with smooth.samples(2) as draws:
        for _ in draws:
            pass
    assert all(map(torch.equal, model.parameters(), before))


def test_weights_side_by_side_do_not_share_memory():
    memory = torch.zeros(12)
    assert not overlap([memory[4:8], memory[:4], memory[8:], torch.zeros(0)])
    assert overlap([memory[:5], memory[8:], memory[4:8]])
    assert overlap([memory, memory[2:3], memory[6:7]])


def test_an_interrupt_while_noise_is_added_or_removed_leaves_clean_weights():
    """A real signal at any moment of perturbed(), 300 times: afterwards the weights are clean."""
    model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(12)])
    smooth = AdaSmoothOut(model)
    before = snapshot(model)
    caught = 0
    for i in range(300):
        timer = threading.Timer(0.00001 * (i % 60), lambda: signal.raise_signal(signal.SIGINT))
        try:
            timer.start()
            for _ in range(3):
                with smooth.perturbed():
                    pass
            timer.join()
            threading.Event().wait(0.001)
        except KeyboardInterrupt:
            caught += 1
        timer.join()
        assert not smooth._perturbation.active
        assert torch.is_grad_enabled()
        assert_same(model, before)
    assert caught > 100


@pytest.mark.parametrize("strength", [0.0375, 0.0])
def test_an_interrupt_before_the_noise_leaves_no_stale_state_dict(monkeypatch, strength):
    def interrupt(self, *_args, **_options):
        raise KeyboardInterrupt

    model = nn.Linear(4, 4)
    smooth = SmoothOut(model, strength)  # whose hook is there as long as it is
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Perturbation, "_add", interrupt)
        with smooth.perturbed():
            pass
    with torch.no_grad():
        model.weight.fill_(7.0)
    assert (model.state_dict()["weight"] == 7).all()


class FailsLater:
    """Ones for the first parameters; what comes then is up to the test."""

    def __init__(self, parameters, then):
        self.left, self.then = parameters, then

    def draw(self, parameter, generator):
        self.left -= 1
        if self.left < 0:
            self.then()
        return torch.ones_like(parameter)


def test_a_failure_between_blocks_leaves_the_latest_weights():
    """The backups of blocks that the draw did not come to are those of the step before."""

    def fail():
        raise OSError("no entropy")

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    noise = FailsLater(4 + 2, fail)
    smooth = SmoothOut(model, noise=noise)
    with smooth.perturbed():
        pass
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    before = snapshot(model)
    with pytest.raises(OSError, match="no entropy"), smooth.perturbed():
        pytest.fail("must not be entered")
    assert_same(model, before)
    noise.left = 4
    with smooth.perturbed():
        assert_moved(model, before, smooth)
    assert_same(model, before)


def test_a_state_saved_in_the_midst_of_a_draw_is_clean():
    """As the handler of a signal does: some blocks have noise then, and others no backup yet."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    clean = copy.deepcopy(model.state_dict())
    saved = []
    with SmoothOut(model, noise=FailsLater(2, lambda: saved.append(copy.deepcopy(model.state_dict())))).perturbed():
        pass
    assert len(saved) == 2
    for state in saved:
        assert all(torch.equal(state[name], clean[name]) for name in clean)


@pytest.mark.parametrize("noise", ["uniform", "rademacher", "gaussian"])
def test_how_many_integers_are_drawn_ahead_does_not_change_the_noise(monkeypatch, noise):
    model = nn.Sequential(nn.Linear(1400, 900), nn.Linear(900, 3))
    expected = SmoothOut(model, noise=noise)._perturbation.draw(1.0, 3)
    monkeypatch.setattr("smoothout.foreach.DRAWN_AHEAD", 1)
    found = SmoothOut(model, noise=noise)._perturbation.draw(1.0, 3)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("noise", [Uniform(), Gaussian(), FailsLater(9, None)])
def test_torchs_default_dtype_does_not_change_the_noise(noise):
    smooth = SmoothOut(nn.Linear(4, 4), noise=noise)
    expected = smooth.perturbation.draw(0.1, 3)
    torch.set_default_dtype(torch.float64)
    try:
        found = SmoothOut(smooth.perturbation.model, noise=noise).perturbation.draw(0.1, 3)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(found, expected):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_a_derived_noise_fills_in_its_own_way():
    class Half(Uniform):
        def fill(self, out, generator):
            out.fill_(0.5)

    (theta, _) = SmoothOut(nn.Linear(4, 4), noise=Half())._perturbation.draw(1.0, 0)
    assert (theta == 0.5).all()


def test_a_derived_noise_draws_in_its_own_way():
    class Ones(Uniform):
        def draw(self, parameter, generator):
            return torch.ones(parameter.shape)

    class Named:
        fill = 1.0  # nothing of ours

        def draw(self, parameter, generator):
            return torch.ones(parameter.shape)

    of_an_instance = types.SimpleNamespace(draw=Ones().draw)
    for noise in (Ones(), Named(), of_an_instance):
        (theta, _) = SmoothOut(nn.Linear(4, 4), noise=noise)._perturbation.draw(0.1, 0)
        assert (theta == 0.1).all()


def test_a_tensor_that_a_noise_keeps_is_not_written_to():
    class Fixed:
        kept = torch.ones(4, 4)

        def draw(self, parameter, generator):
            return self.kept

    with SmoothOut(nn.Linear(4, 4, bias=False), noise=Fixed()).perturbed():
        assert (Fixed.kept == 1).all()


def test_a_failing_noise_leaves_clean_weights():
    class Fails:
        def draw(self, parameter, generator):
            if parameter.ndim == 1:
                raise OSError("no entropy")
            return torch.ones_like(parameter)

    model = nn.Linear(4, 4)
    before = snapshot(model)
    with pytest.raises(OSError, match="no entropy"), SmoothOut(model, noise=Fails()).perturbed():
        pytest.fail("must not be entered")
    assert_same(model, before)


def test_a_noise_that_draws_no_tensor_is_told_what_to_return():
    class DrawsLists:
        def draw(self, parameter, generator):
            return torch.ones_like(parameter).tolist()

    model = nn.Linear(4, 4)
    before = snapshot(model)
    with pytest.raises(TypeError, match=r"drew a list for weight: draw\(parameter, generator\) must return a tensor"):
        with SmoothOut(model, noise=DrawsLists()).perturbed():
            pytest.fail("must not be entered")
    assert_same(model, before)


def test_gradient_inside_is_the_gradient_at_w_plus_theta():
    for case in CASES.values():
        model = case.build().double()
        smooth = AdaSmoothOut(model, strength=0.3)
        theta = dict(zip([s.name for s in smooth._perturbation.selected], smooth._perturbation.draw(0.3, 0)))
        x = case.batch()
        x = x.double() if x.is_floating_point() else x
        twin = copy.deepcopy(model)
        shifted = {
            n: (p.detach() + theta[n].double() if n in theta else p.detach()).requires_grad_(p.requires_grad)
            for n, p in twin.named_parameters()
        }
        functional_call(twin, shifted, (x,)).square().mean().backward()
        with smooth.perturbed():
            model(x).square().mean().backward()
        for name, p in model.named_parameters():
            if p.grad is None:
                assert shifted[name].grad is None
            else:
                torch.testing.assert_close(p.grad, shifted[name].grad, rtol=1e-12, atol=1e-14)


def test_an_optimizer_step_inside_is_undone_and_named():
    model = nn.Linear(4, 4)
    for make in (torch.optim.SGD, torch.optim.AdamW):
        optimizer = make(model.parameters(), lr=0.1)
        before = snapshot(model)
        with pytest.raises(RuntimeError, match=r"weight and 1 other weights were written.*Step after the context"):
            with SmoothOut(model).perturbed():
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
        assert_same(model, before)
    with pytest.raises(RuntimeError, match="weight was written"), SmoothOut(model, strength=0.0).perturbed():
        with torch.no_grad():
            model.weight.add_(1)
    assert_same(model, before)


def test_state_dict_inside_is_clean():
    model = CASES["tied_embedding"].build()
    outer = nn.Sequential(model)
    before = {k: v.clone() for k, v in outer.state_dict().items()}
    smooth = SmoothOut(model)
    with smooth.perturbed():
        inside, part = outer.state_dict(), model.head.state_dict()
        assert not torch.equal(model.head.weight, before["0.head.weight"])
    for name, value in before.items():
        assert torch.equal(inside[name], value), name
    assert torch.equal(part["weight"], before["0.head.weight"])  # and the clones stay as they are
    assert not any(m._state_dict_hooks for m in outer.modules())


def test_a_second_draw_differs_and_a_second_run_repeats():
    model = nn.Linear(5, 5)
    smooth, again = SmoothOut(model), SmoothOut(model)
    draws = []
    for s in (smooth, again):
        for _ in range(2):
            with s.perturbed():
                draws.append(model.weight.detach().clone())
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])
    assert torch.equal(draws[1], draws[3])


def test_a_model_that_moved_is_found_again():
    model = nn.Linear(4, 4)
    smooth = SmoothOut(model)
    with smooth.perturbed():
        pass
    model.double()  # new storage behind the same Parameter
    before = snapshot(model)
    with smooth.perturbed():
        assert_moved(model, before, smooth)
    assert_same(model, before)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)  # new Parameters
    before = snapshot(model)
    with smooth.perturbed():
        assert_moved(model, before, smooth)
    assert_same(model, before)
    del model.weight
    with pytest.raises(RuntimeError, match="'weight' is no longer in the model"), smooth.perturbed():
        pass


def test_blocks_cover_every_element_once_and_large_tensors_are_cut_by_rows():
    model = nn.Sequential(nn.Linear(1400, 900), nn.Linear(900, 3), nn.ConvTranspose1d(1200, 500, 1))
    perturbation: Perturbation = SmoothOut(model)._perturbation
    assert len(perturbation._blocks) == 6  # 3 of 1,260,000 elements, small, one transposed that is never cut, small
    theta = perturbation.draw(1.0, 0)
    for values, parameter in zip(theta, model.parameters()):
        assert values.shape == parameter.shape
        assert (values != 0).all()
    for a in theta:
        flat = a.flatten()[:1000]
        assert flat.unique().numel() > 0.9 * flat.numel()


@pytest.mark.parametrize("first", ["made", "summary", "perturbed"])
def test_inference_mode_does_not_poison_new_buffers(first):
    model = nn.Linear(4, 3)
    with torch.inference_mode(first == "made"):
        smooth = SmoothOut(model)
    if first != "made":
        model.double()  # so that buffers are made anew
    with torch.inference_mode():
        if first == "summary":
            smooth.summary()
        elif first == "perturbed":
            with smooth.perturbed():
                pass
    with smooth.perturbed():
        model(torch.ones(2, 4, dtype=model.weight.dtype)).sum().backward()


def test_inference_mode_does_not_poison_the_buffers():
    model = nn.Linear(4, 4)
    smooth = SmoothOut(model)
    with torch.inference_mode(), smooth.perturbed():
        model(torch.randn(1, 4))
    with smooth.perturbed():
        model(torch.randn(1, 4)).sum().backward()
    assert model.weight.grad is not None


def test_bernoulli_with_weight_scale_is_dropout_of_weights():
    model = nn.Linear(50, 50)
    w = model.weight.detach().clone()
    with SmoothOut(model, 1.0, noise=Bernoulli(0.3), scale="weight").perturbed():
        dropped = model.weight == 0
        assert torch.equal(model.weight[~dropped], w[~dropped])
    assert abs(dropped.float().mean() - 0.3) < 4 * (0.21 / 2500) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weight_scaled_noise_is_made_in_the_precision_of_the_weights(dtype):
    model = nn.Linear(5, 4, dtype=dtype)
    raw = SmoothOut(model)._perturbation.draw(1.0, 0)
    for θ, n, w in zip(SmoothOut(model, scale="weight")._perturbation.draw(0.3, 0), raw, model.parameters()):
        torch.testing.assert_close(θ, 0.3 * w.detach() * n, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_several_draws_inside_one_autocast_region_differ():
    """Autocast caches the low-precision copy of a weight: it must not outlive a draw."""
    model = nn.Linear(8, 8)
    smooth = SmoothOut(model, noise=Gaussian(), strength=1.0)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        clean = model(x)
        outputs = []
        with smooth.samples(2) as draws:
            for _ in draws:
                outputs.append(model(x))
        after = model(x)
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], clean)
    assert torch.equal(clean, after)


class WritesToData(torch.optim.Optimizer):
    """As older optimizers do: autograd's version counters do not see it."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad)


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, 0.1, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, 0.1, fused=True),
        WritesToData,
    ],
)
def test_a_step_inside_that_version_counters_do_not_see_is_noticed(make, monkeypatch):
    monkeypatch.setattr(Witness, "changed", lambda self: [])  # as on a GPU
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    smooth, before = SmoothOut(model), snapshot(model)
    hooks = len(_global_optimizer_post_hooks)
    with pytest.raises(RuntimeError, match=r"weight and 1 other weights were written.*Step after the context"):
        with smooth.perturbed():
            model(torch.randn(2, 4)).sum().backward()
            make(model.parameters()).step()
    assert_same(model, before)
    with smooth.perturbed():  # an optimizer of another model may step
        other(torch.randn(2, 4)).sum().backward()
        make(other.parameters()).step()
    assert len(_global_optimizer_post_hooks) == hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writing_to_data_inside_is_undone_and_on_a_cpu_noticed(dtype):
    model = nn.Linear(4, 3, dtype=dtype)
    smooth, before = SmoothOut(model), snapshot(model)
    noticed = pytest.raises(RuntimeError, match=r"weight and 1 other weights were written.*Step after the context")
    # On a GPU to look would be to wait for it: what was written is undone, and nobody told.
    with noticed if model.bias.device.type == "cpu" else nullcontext(), smooth.perturbed():
        model(torch.randn(2, 4, dtype=dtype)).sum().backward()
        for p in model.parameters():
            p.data -= 0.1 * p.grad
    assert_same(model, before)
    with torch.no_grad():
        model.bias.fill_(float("nan"))
    with smooth.perturbed():
        pass  # what is no number differs from itself


def test_two_smoothouts_do_not_nest():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    one, other, apart = SmoothOut(model), SmoothOut(model[1]), SmoothOut(nn.Linear(4, 4))
    before = snapshot(model)
    with one.perturbed(), apart.perturbed():
        with pytest.raises(RuntimeError, match="another SmoothOut has noise in these weights now"), other.perturbed():
            pass
    assert_same(model, before)
    with other.perturbed():
        pass
    assert_same(model, before)


def test_a_users_hook_on_the_state_dict_sees_clean_weights():
    model = nn.Sequential(nn.Linear(4, 4))
    smooth, clean = SmoothOut(model, 0.5), model[0].weight.detach().clone()

    def rename(module, state, prefix, metadata):
        state[prefix + "w"] = state.pop(prefix + "weight").half()

    model[0].register_state_dict_post_hook(rename)
    with smooth.perturbed():
        assert torch.equal(model.state_dict()["0.w"], clean.half())


def replace_data(model):
    model[0].weight.data = torch.zeros(4, 4)


def replace_parameter(model):
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


@pytest.mark.parametrize("move", [lambda model: model.double(), replace_data, replace_parameter])
def test_weights_that_move_inside_are_clean_afterwards_and_named(move):
    model = nn.Sequential(nn.Linear(4, 4))
    smooth = SmoothOut(model)
    clean = {name: p.detach().clone() for name, p in model.named_parameters()}
    with (
        pytest.raises(RuntimeError, match=r"0\.weight was replaced or got other memory while noise was applied"),
        smooth.perturbed(),
    ):
        move(model)
    with pytest.raises(ZeroDivisionError), smooth.perturbed():
        model.to(torch.float64 if model[0].weight.dtype == torch.float32 else torch.float32)
        raise ZeroDivisionError
    for name, p in model.named_parameters():
        assert torch.equal(p.float(), clean[name])
    before = snapshot(model)
    with smooth.perturbed():
        assert_moved(model, before, smooth)
    assert_same(model, before)


@pytest.mark.parametrize("new", [None, nn.Parameter(torch.zeros(2))])
def test_a_weight_that_was_taken_out_or_resized_inside_is_named(new):
    model = nn.Linear(4, 4)
    clean = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"^bias was replaced"), SmoothOut(model).perturbed():
        model.bias = new
    assert torch.equal(model.weight, clean)


def test_a_copy_made_inside_has_a_state_dict_of_its_own():
    model = nn.Linear(4, 4)
    with SmoothOut(model).perturbed():
        twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for twin in twins:
        with torch.no_grad():
            twin.weight.fill_(7.0)
        assert (twin.state_dict()["weight"] == 7).all()


def test_draw_into_rounds_once_to_the_destinations_dtype_takes_a_sign_and_advances():
    p = AdaSmoothOut(nn.Linear(6, 5))._perturbation
    p.set_position(0.2, 3)
    p.advance()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        copies = [torch.empty_like(w, dtype=dtype) for w in p.local_weights]
        p.draw_into(copies, 1, sign=-1.0)
        for one, w, theta in zip(copies, p.local_weights, p.draw(0.2, 4, 1)):
            torch.testing.assert_close(one, (w - theta).to(dtype), rtol=0, atol=0)


def test_writing_to_the_data_of_a_large_weight_is_noticed():
    model = nn.ModuleDict({"large": nn.Linear(40, 30), "scale": nn.ParameterList([torch.ones(1)])})
    smooth, before = SmoothOut(model), snapshot(model)
    if model["large"].weight.device.type != "cpu":
        pytest.skip("on a GPU to look would be to wait for it")
    with pytest.raises(RuntimeError, match=r"large.weight was written"), smooth.perturbed():
        model["large"].weight.data.mul_(0.9)
    assert_same(model, before)


def test_writing_to_the_data_of_one_element_of_a_small_weight_is_noticed():
    model = nn.Linear(5, 1)
    smooth, before = SmoothOut(model), snapshot(model)
    if model.weight.device.type != "cpu":
        pytest.skip("on a GPU to look would be to wait for it")
    with pytest.raises(RuntimeError, match=r"^weight was written"), smooth.perturbed():
        model.weight.data[0, 2] += 1.0
    assert_same(model, before)


def test_memory_shared_by_two_parameters_is_said():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight.data = model[0].weight.data
    with pytest.warns(UserWarning, match="share memory.*as one parameter"):
        SmoothOut(model)
