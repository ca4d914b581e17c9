"""Algorithm 1 against its slow twin, and in the company of everything else a training loop holds."""

import copy
import dataclasses
import io
import math
import pickle
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from cases import CASES, assert_equal_models, assert_moved, assert_same, snapshot
from reference import reference_step
from smoothout import AdaSmoothOut, Bernoulli, SmoothOut, SmoothOutEnsemble, schedule
from smoothout.perturb import Perturbation


def mlp(dropout=0.0, dtype=torch.float32):
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3)).to(dtype)


def squared_error(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def batches(n, size=8, dtype=torch.float32):
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    return [
        (torch.randn(size, 6, generator=generator, dtype=dtype), torch.randn(size, 3, generator=generator, dtype=dtype))
        for _ in range(n)
    ]


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
}


class Recorder:
    """Uniform noise that keeps what it drew, so that the reference can use the same raw values."""

    def __init__(self):
        self.drawn = []

    def draw(self, parameter, generator):
        self.drawn.append(torch.empty_like(parameter).uniform_(-1, 1, generator=generator))
        return self.drawn[-1].clone()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("method", "scale", "strength"), [(SmoothOut, "absolute", 0.0375), (AdaSmoothOut, "filter", 0.15)]
)
def test_100_steps_equal_the_reference_bit_for_bit(method, scale, strength, optimizer):
    model = mlp()
    twin = copy.deepcopy(model)
    noise = Recorder()
    smooth = method(model, strength, noise=noise)
    ours, theirs = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](twin.parameters())
    names = [name for name, _ in model.named_parameters()]
    for batch in batches(100):
        noise.drawn.clear()
        with smooth.perturbed():
            loss = squared_error(model, batch)
            loss.backward()
        ours.step()
        ours.zero_grad()
        raw = dict(zip(names, noise.drawn))
        assert torch.equal(
            loss.detach(), reference_step(twin, theirs, squared_error, batch, raw, strength, scale, names)
        )
    assert_equal_models(model, twin)


def train(model, steps, smooth=None, optimizer=None, data=None):
    optimizer = optimizer or OPTIMIZERS["sgd"](model.parameters())
    for batch in data or batches(steps):
        if smooth is None:
            squared_error(model, batch).backward()
        else:
            with smooth.perturbed():
                squared_error(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("method", [SmoothOut, AdaSmoothOut])
def test_strength_zero_is_plain_training_with_dropout(method):
    plain = mlp(dropout=0.5)
    smoothed = copy.deepcopy(plain)
    torch.manual_seed(3)
    train(plain, 20)
    rng = torch.get_rng_state()
    torch.manual_seed(3)
    train(smoothed, 20, method(smoothed, strength=0.0))
    assert torch.equal(rng, torch.get_rng_state())
    assert_equal_models(plain, smoothed)


def test_strength_zero_allows_a_late_backward_as_plain_training_does():
    model = mlp()
    with SmoothOut(model, strength=0.0).perturbed():
        loss = squared_error(model, batches(1)[0])
    loss.backward()
    assert model[0].weight.grad is not None


def test_the_global_generator_is_untouched():
    model = mlp()
    state = torch.get_rng_state()
    for noise in ("uniform", "gaussian", "rademacher"):
        with AdaSmoothOut(model, noise=noise).perturbed():
            pass
    assert torch.equal(state, torch.get_rng_state())


def test_accumulating_four_micro_batches_equals_one_batch():
    model = mlp(dtype=torch.float64)
    twin = copy.deepcopy(model)
    (x, y), *_ = batches(1, size=32, dtype=torch.float64)
    with SmoothOut(model).perturbed():
        squared_error(model, (x, y)).backward()
    with SmoothOut(twin).perturbed():
        for part in zip(x.chunk(4), y.chunk(4)):
            (squared_error(twin, part) / 4).backward()
    for a, b in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-15)


def test_amp_accumulation_clipping_scaler_and_scheduler_together():
    model = mlp()
    smooth = AdaSmoothOut(model)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step, (x, y) in enumerate(batches(20, size=16)):
        before = snapshot(model)
        with smooth.perturbed(), torch.autocast("cpu", dtype=torch.bfloat16):
            for part in zip(x.chunk(2), y.chunk(2)):
                scaler.scale(squared_error(model, part) / 2).backward()
        assert_same(model, before)
        if step == 5:
            model[0].weight.grad[0, 0] = math.inf  # an overflow: the scaler skips this step
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        assert (step == 5) == all(torch.equal(p, before[n][0]) for n, p in model.named_parameters())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_inside_the_context(use_reentrant):
    model = mlp()
    twin = copy.deepcopy(model)
    x, y = batches(1)[0]
    x.requires_grad_()
    with SmoothOut(model).perturbed():
        squared_error(model, (x, y)).backward()
    with SmoothOut(twin).perturbed():
        (checkpoint(twin, x, use_reentrant=use_reentrant) - y).square().mean().backward()
    for a, b in zip(model.parameters(), twin.parameters()):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_backward_after_the_exit_under_whole_model_checkpointing_raises(use_reentrant):
    model = mlp()
    x = torch.randn(4, 6, requires_grad=True)
    smooth = SmoothOut(model)
    with smooth.perturbed():
        late = checkpoint(model, x, use_reentrant=use_reentrant).sum()
    with pytest.raises(RuntimeError, match="noise is gone"):
        late.backward()
    with smooth.perturbed():
        first = checkpoint(model, x, use_reentrant=False).sum()
    with smooth.perturbed(), pytest.raises(RuntimeError, match="noise is gone"):
        first.backward()
    with smooth.perturbed():
        again = checkpoint(model, x, use_reentrant=use_reentrant).sum()
    with pytest.raises(RuntimeError, match="noise is gone"):
        again.backward()
    with smooth.perturbed():
        pass
    model(x).sum().backward()  # outside, nothing is watched any more


def test_a_backward_after_the_exit_raises_or_needed_no_weight():
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3, requires_grad=True)
    with SmoothOut(model).perturbed():
        needs_weight = model(x).sum()
    with pytest.raises(RuntimeError, match=r"noise is gone|modified by an inplace operation"):
        needs_weight.backward()
    # One forward outside the model's own __call__: autograd's version counter still notices.
    with SmoothOut(model).perturbed():
        by_hand = nn.functional.linear(x, model.weight).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        by_hand.backward()


def test_outputs_in_containers_are_watched():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return {"logits": [checkpoint(self.inner, x, use_reentrant=False)], "other": object()}

    model = Wrapped()
    with SmoothOut(model).perturbed():
        out = model(torch.randn(2, 3))
    with pytest.raises(RuntimeError, match="noise is gone"):
        out["logits"][0].sum().backward()


@pytest.mark.parametrize("options", [{}, {"slots": True}, {"frozen": True}])
def test_outputs_in_dataclasses_are_watched(options):
    output = dataclasses.make_dataclass("Output", ["logits", "note"], **options)

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return output(checkpoint(self.inner, x, use_reentrant=False), "text")

    model = Wrapped()
    with SmoothOut(model).perturbed():
        out = model(torch.randn(2, 3))
    with pytest.raises(RuntimeError, match="noise is gone"):
        out.logits.sum().backward()


class Mlp(nn.Module):
    """Not a container of torch's own: the compiler treats those differently."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("way", ["perturbed", "samples", "samples that stay"])
def test_a_compiled_step(way):
    def train(compile):
        torch.manual_seed(0)
        model = mlp()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        smooth = SmoothOut(model, 0.3, denoise=way != "samples that stay")

        def step(batch):
            if way == "perturbed":
                with smooth.perturbed():
                    squared_error(model, batch).backward()
            else:
                with smooth.samples(2) as draws:
                    for _ in draws:
                        (squared_error(model, batch) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()

        step = compile(step)
        for batch in batches(3):
            step(batch)
        return list(model.parameters())

    compiled = train(lambda step: torch.compile(step, backend="aot_eager"))
    for p, q in zip(compiled, train(lambda step: step)):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build", [mlp, Mlp])
@pytest.mark.parametrize("when", ["before", "after", "in place"])
def test_compiled_model(build, when):
    if (build, when) == (mlp, "in place"):
        pytest.skip("torch itself refuses to compile its own containers in place with fullgraph")
    model = build()
    plain = copy.deepcopy(model)
    torch._dynamo.reset()
    if when == "in place":
        model.compile(backend="aot_eager", fullgraph=True)
        compiled, smooth = model, SmoothOut(model, 0.3)
    elif when == "before":
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        smooth = SmoothOut(compiled, 0.3)
    else:
        smooth = SmoothOut(model, 0.3)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    eager = SmoothOut(plain, 0.3)
    optimizer, eager_optimizer = OPTIMIZERS["sgd"](model.parameters()), OPTIMIZERS["sgd"](plain.parameters())
    for batch in batches(5):
        before = snapshot(model)
        with smooth.perturbed():
            loss = squared_error(compiled, batch)
            loss.backward()
        assert_same(model, before)
        optimizer.step()
        optimizer.zero_grad()
        with eager.perturbed():
            eager_loss = squared_error(plain, batch)
            eager_loss.backward()
        eager_optimizer.step()
        eager_optimizer.zero_grad()
        torch.testing.assert_close(loss, eager_loss, rtol=1e-6, atol=1e-7)
    with smooth.perturbed():
        late = squared_error(compiled, batch)
    with pytest.raises(RuntimeError, match=r"noise is gone|modified by an inplace operation"):
        late.backward()


def test_samples_average_their_gradients_and_count_as_one_step():
    model = mlp(dtype=torch.float64)
    batch = batches(1, dtype=torch.float64)[0]
    smooth = SmoothOut(model, 0.1)
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(3):
        theta = smooth._perturbation.draw(0.1, step=0, draw=i)
        shifted = copy.deepcopy(model)
        with torch.no_grad():
            torch._foreach_add_(list(shifted.parameters()), theta)
        squared_error(shifted, batch).backward()
        torch._foreach_add_(expected, [p.grad / 3 for p in shifted.parameters()])
    with smooth.samples(3) as draws:
        for _ in draws:
            (squared_error(model, batch) / 3).backward()
    for p, e in zip(model.parameters(), expected):
        torch.testing.assert_close(p.grad, e, rtol=1e-9, atol=1e-12)
    assert smooth.step_count == 1


def test_one_sample_is_one_perturbed():
    model = mlp()
    smooth, before = SmoothOut(model), snapshot(model)
    with SmoothOut(twin := copy.deepcopy(model)).perturbed(), smooth.samples(1) as draws:
        for _ in draws:
            assert_moved(model, before, smooth)
            assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert_same(model, before)


def test_samples_neither_nest_nor_outlive_their_block():
    model = mlp()
    smooth, before = SmoothOut(model), snapshot(model)
    with pytest.raises(RuntimeError, match="does not nest"), smooth.samples(2):  # no draw is applied yet
        with smooth.perturbed():
            pass
    with smooth.samples(2) as draws:
        next(draws)
    with pytest.raises(RuntimeError, match=r"samples\(\) is over"):
        next(draws)
    assert_same(model, before)
    assert smooth.step_count == 2


def test_copies_of_a_smoothout_train_their_own_model():
    model = mlp()
    smooth = SmoothOut(model)
    smooth.attach(OPTIMIZERS["sgd"](model.parameters()))
    for twin in (copy.deepcopy(smooth), pickle.loads(pickle.dumps(smooth))):
        assert twin.state_dict() == smooth.state_dict()
        before = snapshot(model)
        with twin.perturbed():  # not attached
            assert_same(model, before)
    pending = squared_error(model, batches(1)[0])
    with pytest.raises(RuntimeError, match="while its noise is applied"):
        copy.deepcopy(smooth)
    pending.backward()


def test_antithetic_pairs_cancel_a_linear_loss():
    model = nn.Linear(4, 4, bias=False)
    w = model.weight.detach().clone()
    seen = []
    with SmoothOut(model, 0.2).samples(4, antithetic=True) as draws:
        for _ in draws:
            seen.append(model.weight.detach() - w)
    torch.testing.assert_close(seen[0], -seen[1], rtol=0, atol=1e-7)
    torch.testing.assert_close(seen[2], -seen[3], rtol=0, atol=1e-7)
    assert not torch.allclose(seen[0], seen[2])


def test_without_denoising_a_normal_exit_keeps_theta_and_an_exception_does_not():
    model = nn.Linear(4, 4)
    smooth = SmoothOut(model, 0.2, denoise=False)
    w = model.weight.detach().clone()
    theta = smooth._perturbation.draw(0.2, step=0)[0]
    with smooth.perturbed():
        assert torch.equal(model.state_dict()["weight"], w)
    assert torch.equal(model.weight, w + theta)
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), smooth.perturbed():
        raise ZeroDivisionError
    assert_same(model, before)
    first, second = (smooth._perturbation.draw(0.2, smooth.step_count, i)[0] for i in range(2))
    with smooth.samples(2) as draws:  # each draw comes on top of the last, as in the authors' ghost batches
        seen = [model.weight.detach().clone() for _ in draws]
    assert torch.equal(seen[0], before["weight"][0] + first)
    assert torch.equal(seen[1], seen[0] + second)
    assert torch.equal(model.weight, seen[1])


def test_strengths_are_the_papers_unless_given():
    assert [kind(LINEAR).strength for kind in (SmoothOut, AdaSmoothOut)] == [0.0375, 0.15]


def test_numbers_of_numpy_are_numbers():
    smooth = SmoothOut(nn.Linear(2, 2), np.float32(0.5), seed=np.int64(3))
    assert (smooth.strength, type(smooth.strength)) == (0.5, float)
    assert type(smooth.state_dict()["seed"]) is int
    with smooth.samples(np.int64(2)) as draws:
        assert list(draws) == [0, 1]
    assert SmoothOutEnsemble(nn.Linear(2, 2), copies=np.int64(3), chunk=np.int64(2)).copies == 3
    with pytest.raises(ValueError, match="its 'seed' is"):
        smooth.load_state_dict(smooth.state_dict() | {"seed": 2**70})


def test_schedule_and_position():
    model = nn.Linear(2, 2)
    smooth = SmoothOut(model, 0.4, schedule=schedule.Linear(steps=4))
    strengths = []
    for _ in range(6):
        strengths.append(smooth.current_strength)
        with smooth.perturbed():
            assert smooth.current_strength == strengths[-1]
    assert strengths == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.4])
    assert smooth.step_count == 6


@pytest.mark.parametrize("method", [SmoothOut, AdaSmoothOut])
def test_fifty_and_fifty_steps_equal_a_hundred(method):
    options = {"schedule": schedule.Cosine(100), "seed": 7}
    data = batches(100)
    straight = mlp()
    first_half = copy.deepcopy(straight)
    train(straight, 100, method(straight, **options), data=data)

    smooth, optimizer = method(first_half, **options), OPTIMIZERS["sgd"](first_half.parameters())
    train(first_half, 50, smooth, optimizer, data[:50])
    states = copy.deepcopy((first_half.state_dict(), optimizer.state_dict(), smooth.state_dict()))

    second_half = mlp()
    smooth, optimizer = method(second_half, **(options | {"seed": 0})), OPTIMIZERS["sgd"](second_half.parameters())
    second_half.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    smooth.load_state_dict(states[2])
    train(second_half, 50, smooth, optimizer, data[50:])
    assert_equal_models(straight, second_half)


def test_a_state_of_another_model_or_generator_is_noticed():
    smooth = SmoothOut(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"another model or selection.*2 tensors, 12 elements.*2 tensors, 6 elements"):
        smooth.load_state_dict(SmoothOut(nn.Linear(3, 3)).state_dict())
    with pytest.raises(ValueError, match=r"no state of a SmoothOut: .*'seed'"):
        smooth.load_state_dict({"step": 1})
    with pytest.warns(UserWarning, match="'cuda' generator, here it is 'cpu'"):
        smooth.load_state_dict(smooth.state_dict() | {"generator": "cuda"})
    wrapped = SmoothOut(torch.compile(nn.Linear(2, 2), backend="eager"))
    wrapped.load_state_dict(smooth.state_dict())  # wrappers' prefixes do not make another model
    torch.save(smooth.state_dict(), buffer := __import__("io").BytesIO())
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == smooth.state_dict()


LINEAR = nn.Linear(2, 2)
STATE = SmoothOut(LINEAR).state_dict()
BAD_INPUT = [
    (lambda: SmoothOut(LINEAR, -0.1), ValueError, r"strength=-0\.1: give a finite number that is not negative"),
    (lambda: SmoothOut(LINEAR, math.nan), ValueError, "strength=nan"),
    (lambda: SmoothOut(LINEAR, math.inf), ValueError, "strength=inf"),
    (lambda: SmoothOut(LINEAR, "0.1"), TypeError, "strength='0.1' is a str"),
    (lambda: SmoothOut(LINEAR, True), TypeError, "strength=True is a bool"),
    (lambda: SmoothOut(LINEAR, noise="pink"), ValueError, "noise='pink' is not known: use one of .*'uniform'"),
    (lambda: SmoothOut(LINEAR, noise=3), TypeError, r"noise=3 has no method draw\(parameter, generator\)"),
    (lambda: SmoothOut(LINEAR, scale="layer"), ValueError, "scale='layer' is not known: use one of .*'filter'"),
    (
        lambda: AdaSmoothOut(LINEAR, scale="absolute"),
        ValueError,
        "scale='absolute': AdaSmoothOut scales noise by filters",
    ),
    (lambda: SmoothOut(LINEAR, noise=Bernoulli(0.1)), ValueError, 'needs scale="weight"'),
    (lambda: Bernoulli(1.5), ValueError, "p=1.5"),
    (lambda: SmoothOut(LINEAR, schedule=0.5), TypeError, "schedule=0.5 is not callable"),
    (lambda: SmoothOut(LINEAR, schedule="linear"), TypeError, r"such as smoothout\.schedule\.Linear\(1000\)"),
    (lambda: SmoothOut(LINEAR, schedule=schedule.Cosine), TypeError, r"schedule is the class Cosine: .* Cosine\(…\)"),
    (lambda: SmoothOut(LINEAR, schedule=lambda t: -1.0).current_strength, ValueError, "gave -1.0 at step 0"),
    (lambda: SmoothOut(LINEAR, select="all"), TypeError, "select='all' is not callable"),
    (lambda: SmoothOut(LINEAR, seed=1.5), TypeError, "seed=1.5"),
    (lambda: SmoothOut(LINEAR, seed=2**64), ValueError, "seed=18446744073709551616"),
    (lambda: SmoothOut([LINEAR]), TypeError, "model is a list: give a torch.nn.Module"),
    (lambda: SmoothOut(nn.DataParallel(LINEAR)), ValueError, "model is a DataParallel"),
    (lambda: SmoothOut(nn.Sequential(nn.DataParallel(LINEAR))), ValueError, "model is a DataParallel"),
    (lambda: SmoothOut(type("FullyShardedDataParallel", (nn.Linear,), {})(2, 2)), ValueError, "the first FSDP"),
    (lambda: SmoothOut(nn.ParameterList([torch.zeros(0)])), ValueError, "nothing to perturb in ParameterList"),
    (lambda: SmoothOut(nn.ParameterList([torch.zeros(2).to(torch.float8_e5m2)])), ValueError, "0 is torch.float8_e5m2"),
    (lambda: SmoothOut(nn.ParameterList([TwoTensor(torch.ones(2), torch.ones(2))])), ValueError, "0 is a TwoTensor"),
    (lambda: SmoothOut(LINEAR).load_state_dict(None), TypeError, "state is a NoneType"),
    (lambda: SmoothOut(LINEAR).load_state_dict(STATE | {"step": "3"}), ValueError, "its 'step' is '3'"),
    (lambda: SmoothOut(LINEAR).load_state_dict(STATE | {"draw": -1}), ValueError, "its 'draw' is -1"),
    (lambda: SmoothOut(nn.ReLU()), ValueError, "nothing to perturb in ReLU"),
    (lambda: SmoothOut(nn.BatchNorm1d(3)), ValueError, "nothing to perturb in BatchNorm1d.*normalisation"),
    (lambda: SmoothOut(LINEAR, select=lambda *_: False), ValueError, "for which select holds"),
    (lambda: SmoothOut(nn.LazyLinear(3)), ValueError, "^weight has no shape yet"),
    (lambda: SmoothOut(nn.Linear(2, 2, device="meta")), ValueError, "meta device"),
    (lambda: SmoothOut(LINEAR).samples(0).__enter__(), ValueError, r"samples\(n=0\)"),
    (lambda: SmoothOut(LINEAR).samples(3, antithetic=True).__enter__(), ValueError, "even with antithetic"),
    (lambda: schedule.Linear(0), ValueError, r"Linear\(steps=0\)"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_INPUT, ids=[message for *_, message in BAD_INPUT])
def test_bad_input_is_named_before_anything_is_touched(call, error, message):
    before = snapshot(LINEAR)
    with pytest.raises(error, match=message):
        call()
    assert_same(LINEAR, before)


def test_bad_noise_shapes_are_named():
    class Wrong:
        def draw(self, parameter, generator):
            return torch.zeros(1)

    with pytest.raises(ValueError, match=r"drew a tensor of shape \(1,\) for weight, whose shape is \(2, 2\)"):
        with SmoothOut(LINEAR, noise=Wrong()).perturbed():
            pass


def test_summary_reports_realised_ratios():
    model = CASES["tied_embedding"].build()
    summary = AdaSmoothOut(model, 0.25).summary()
    (row,) = summary.tensors
    assert (row.name, row.filters) == ("embed.weight", 11)
    # The padding row takes no noise (and is zero); all others take a quarter of their norm.
    assert row.ratio == pytest.approx(0.25, rel=1e-5)
    assert "embed.weight" in str(summary)
    assert "11×6" in str(summary)


def test_a_summary_of_zeros():
    zeros = nn.ParameterList([torch.zeros(3)])
    assert [kind(zeros).summary().tensors[0].ratio for kind in (SmoothOut, AdaSmoothOut)] == [math.inf, 0.0]


# ---- what a hurried user does ----------------------------------------------------------------------------------------


def test_samples_whose_draws_nobody_takes_are_refused():
    smooth = SmoothOut(nn.Linear(4, 3))
    with pytest.raises(RuntimeError, match="without a draw, so without noise"), smooth.samples(4):
        pass
    with smooth.samples(4) as draws:
        next(draws)
    with pytest.raises(KeyError), smooth.samples(4):
        raise KeyError  # said first


def test_a_layer_that_was_replaced_is_noticed_and_one_that_was_wrapped_is_not():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 3)))
    smooth = SmoothOut(model)
    model[0] = nn.Sequential(model[0])
    clean = model[0][0].weight.detach().clone()
    with smooth.perturbed():
        assert not torch.equal(model[0][0].weight, clean)
    again = copy.deepcopy(smooth)
    with again.perturbed():
        pass
    model[1][1] = nn.Linear(4, 3)
    with pytest.raises(RuntimeError, match=r"the layer of '1\.1\.weight' was replaced: make a new SmoothOut"):
        smooth.perturbed().__enter__()
    model[1] = nn.Sequential(nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(RuntimeError, match="was replaced"):
        smooth.summary()
    with SmoothOut(model).perturbed():
        pass


def test_what_noise_in_the_weights_would_spoil_is_refused_between_two_draws_too():
    model = nn.Linear(4, 3)
    smooth = SmoothOut(model)
    refused = (
        ("cannot be copied", lambda: copy.deepcopy(smooth)),
        (r"load_state_dict\(\) while noise is applied", lambda: smooth.load_state_dict(smooth.state_dict())),
        (r"attach\(\) while noise is applied", lambda: smooth.attach(OPTIMIZERS["sgd"](model.parameters()))),
    )
    for message, call in refused:
        with smooth.perturbed(), pytest.raises(RuntimeError, match=message):
            call()
        with smooth.samples(2) as draws:
            list(draws)
            with pytest.raises(RuntimeError, match=message):
                call()
        call()


def test_flags_and_schedules_of_the_wrong_kind():
    for name in ("denoise", "shared_noise"):
        with pytest.raises(TypeError, match=f"{name}='false': give True or False"):
            SmoothOut(nn.Linear(4, 3), **{name: "false"})
    with pytest.raises(TypeError, match="gave None at step 0: a factor is a number"):
        _ = SmoothOut(nn.Linear(4, 3), schedule=lambda step: None).current_strength


def test_cached_parametrizations_see_the_noise_and_lose_it():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3, bias=False))
    smooth, x = SmoothOut(layer, 0.5), torch.randn(2, 4)
    with nn.utils.parametrize.cached():
        before = layer(x)
        with smooth.perturbed():
            noisy = layer(x)
        after = layer(x)
    assert not torch.equal(before, noisy)
    assert torch.equal(before, after)


def test_reentrant_checkpointing_step_after_step():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    smooth, x = SmoothOut(model, 0.1), torch.randn(3, 4, requires_grad=True)
    for reentrant in (True, True, False):
        with smooth.perturbed():
            for part in x.split(2):
                checkpoint(model, part, use_reentrant=reentrant).sum().backward()


def test_an_interrupt_while_torch_registers_a_hook_does_no_harm():
    """It sets the note that a hook takes keywords one line after the hook."""
    model, x = nn.Linear(6, 3), torch.randn(2, 6)
    smooth = SmoothOut(model, 0.1)

    def trace(frame, event, argument):
        if frame.f_code.co_name == "register_forward_hook" and event == "line" and model._forward_hooks:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        with pytest.raises(KeyboardInterrupt), smooth.perturbed():
            model(x)
    finally:
        sys.settrace(before)
    with smooth.perturbed():
        model(x).sum().backward()


def test_layers_that_write_their_own_weights_and_compiled_scripts_are_refused():
    model = nn.Sequential(nn.Embedding(7, 5, max_norm=1.0), nn.Linear(5, 1))
    with pytest.raises(ValueError, match=r"0\.weight is rescaled .* leave it out by select"):
        SmoothOut(model)
    smooth = SmoothOut(model, select=lambda name, parameter, module: name != "0.weight")
    with smooth.perturbed():
        model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match=r"torch\.jit"):
        SmoothOut(torch.jit.script(nn.Linear(2, 2)))


def test_a_strength_that_was_set_by_hand_is_missed_when_a_run_goes_on():
    model = nn.Linear(4, 4)
    smooth, again = SmoothOut(model, strength=0.1), SmoothOut(model, strength=0.1)
    smooth.strength = 0.01
    with pytest.warns(UserWarning, match=r"saved with strength=0\.01, here it is 0\.1"):
        again.load_state_dict(smooth.state_dict())
    again.strength = 0.01
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state_dict(smooth.state_dict())
        again.load_state_dict({k: v for k, v in smooth.state_dict().items() if k != "strength"})  # of before


def test_copies_of_a_noisy_model_warn():
    model, stream = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), io.BytesIO()
    smooth = SmoothOut(model, 0.1)
    with smooth.perturbed():
        with pytest.warns(UserWarning, match="this copy of a model has the noise in its weights"):
            copy.deepcopy(model)
        with pytest.warns(UserWarning, match="save state_dict"):
            torch.save(model, stream)
    smooth.strength = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(model)
        with smooth.perturbed():
            copy.deepcopy(model)


def test_weights_tied_later_are_noticed():
    model = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False)})
    smooth = AdaSmoothOut(model)
    model["b"].weight = model["a"].weight
    with pytest.raises(RuntimeError, match="tied after SmoothOut was made"), smooth.perturbed():
        pass


def test_a_state_tells_the_generator_that_drew_and_is_held_against_the_one_that_will(monkeypatch):
    """A model may be moved between the last draw and saving, and between SmoothOut and loading."""
    model = nn.Linear(4, 4)
    smooth = SmoothOut(model)
    with smooth.perturbed():
        pass
    drew = smooth.state_dict()["generator"]
    model.to("meta")  # as model.cpu() would after draws on a GPU
    assert smooth.state_dict()["generator"] == drew != "meta"
    other = SmoothOut(nn.Linear(4, 4))
    moved = []
    monkeypatch.setattr(Perturbation, "find_weights", lambda self: moved.append(self))
    other.load_state_dict(other.state_dict())
    assert moved == [other.perturbation]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bernoulli_drops_weights_to_exactly_zero(dtype):
    model = nn.Linear(40, 40, dtype=dtype)
    clean = model.weight.detach().clone()
    with SmoothOut(model, 1.0, noise=Bernoulli(0.3), scale="weight").perturbed():
        dropped = model.weight == 0
        assert torch.equal(model.weight[~dropped], clean[~dropped])
    assert 0.2 < dropped.double().mean() < 0.4


@pytest.mark.parametrize("strength", [0.1, 0.0])
def test_passes_after_all_draws_were_taken_are_noticed(strength, recwarn):
    model, x = mlp(), torch.randn(4, 6)
    smooth = SmoothOut(model, strength)
    with smooth.samples(2) as draws:
        for _ in list(draws):
            model(x).sum().backward()
    assert [str(w.message)[:27] for w in recwarn] == (["no forward inside samples()"] if strength else [])
    recwarn.clear()
    with smooth.samples(2) as draws:
        for _ in draws:
            model[3](model[0](x)).sum().backward()  # not by the model's own call
        with torch.no_grad():
            model(x)  # a look
    with smooth.samples(2) as draws:
        for _ in draws:
            model(x).sum().backward()
        model(x).sum().backward()  # one pass more, at the clean weights
    assert not recwarn.list


def test_several_draws_with_reentrant_checkpointing_of_the_whole_model():
    model, x = mlp(), torch.randn(4, 6, requires_grad=True)
    gradients = []
    for checkpointed in (True, False):
        model.zero_grad()
        with SmoothOut(model, 0.1).samples(2) as draws:
            for _ in draws:
                (checkpoint(model, x, use_reentrant=True) if checkpointed else model(x)).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*gradients, strict=True))
