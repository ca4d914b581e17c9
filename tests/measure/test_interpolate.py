import json

import numpy as np
import pytest
import torch
from networks import Function, accuracy, batches, cross_entropy, mlp, trained, value_of
from torch import nn

from smoothout import SmoothOut, measure, update_bn
from smoothout.measure import Interpolation

ALPHAS = [round(-1 + i / 10, 1) for i in range(31)]


def states():
    return [{n: t.clone() for n, t in trained(mlp(seed=s), batches()).state_dict().items()} for s in (1, 2)]


def evaluated(state, data):
    model = mlp().eval()
    model.load_state_dict(state)
    with torch.no_grad():
        losses = [cross_entropy(model, b).item() for b in data]
    weights = [len(b[1]) for b in data]
    return sum(w * loss for w, loss in zip(weights, losses)) / sum(weights)


@pytest.mark.parametrize("count", [1, 3])
def test_the_ends_are_those_of_direct_evaluation_bit_for_bit(count):
    a, b = states()
    data = batches(count)
    found = measure.interpolate(mlp(), a, b, cross_entropy, data, [0.0, 0.5, 1.0])
    assert found.losses[0] == evaluated(a, data)
    assert found.losses[2] == evaluated(b, data)
    half = {n: (a[n] + b[n]) / 2 if a[n].is_floating_point() else a[n] for n in a}
    assert found.losses[1] == pytest.approx(evaluated(half, data), rel=1e-5)


def test_an_end_has_nothing_of_the_other_even_if_that_diverged():
    a, _ = states()
    diverged = {n: torch.full_like(t, float("inf")) if t.is_floating_point() else t for n, t in a.items()}
    for first, second, α in ((a, diverged, 0.0), (diverged, a, 1.0)):
        assert measure.interpolate(mlp(), first, second, cross_entropy, batches(), [α]).losses == (
            evaluated(a, batches()),
        )


def test_a_quadratic_along_the_line():
    model = Function(lambda w: (w**2).sum(), torch.zeros(2))
    a, b = {"w": torch.tensor([1.0, 0.0]).double()}, {"w": torch.tensor([0.0, 2.0]).double()}
    found = measure.interpolate(model, a, b, value_of, [0], ALPHAS)
    assert found.losses == pytest.approx([(1 - α) ** 2 + 4 * α**2 for α in ALPHAS], rel=1e-14)
    assert found.alphas == tuple(ALPHAS)
    assert found.accuracies is None


def test_the_states_may_be_the_models_own():
    model, other = trained(mlp(seed=1), batches()), trained(mlp(seed=2), batches())
    a, b = ({n: t.clone() for n, t in m.state_dict().items()} for m in (model, other))
    live = measure.interpolate(model, model.state_dict(), other.state_dict(), cross_entropy, batches(), ALPHAS)
    assert live == measure.interpolate(mlp(), a, b, cross_entropy, batches(), ALPHAS)


def test_the_states_may_be_the_models_own_under_other_names():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def exchanged(state):
        return {f"{2 - int(name[0])}{name[1:]}": tensor for name, tensor in state.items()}

    state, data = {n: t.clone() for n, t in model.state_dict().items()}, batches()
    expected = measure.interpolate(model, state, exchanged(state), cross_entropy, data, [0.0, 0.5, 1.0])
    live = model.state_dict()
    assert measure.interpolate(model, live, exchanged(live), cross_entropy, data, [0.0, 0.5, 1.0]) == expected
    with SmoothOut(model, 0.3).perturbed():
        noisy = dict(model.named_parameters())
        copies = {name: parameter.detach().clone() for name, parameter in noisy.items()}
        expected = measure.interpolate(model, copies, state, cross_entropy, data, [0.0, 0.5, 1.0])
        assert measure.interpolate(model, noisy, state, cross_entropy, data, [0.0, 0.5, 1.0]) == expected


def test_inside_perturbed_the_line_is_that_between_the_states():
    model, data = mlp(), batches()
    a, b = states()
    expected = measure.interpolate(model, a, b, cross_entropy, data, [0.0, 0.5, 1.0])
    with SmoothOut(model, 0.3).perturbed():
        assert measure.interpolate(model, a, b, cross_entropy, data, [0.0, 0.5, 1.0]) == expected


def test_statistics_outside_the_ends_give_no_nan():
    """At α = −1 or 2 an interpolated variance can be negative."""
    a, b = states()
    a["1.running_var"] *= 100
    found = measure.interpolate(mlp(), a, b, cross_entropy, batches(), ALPHAS, accuracy_fn=accuracy)
    assert np.isfinite(found.losses).all()
    assert len(found.accuracies) == 31


def test_recomputed_statistics():
    """Statistics of the ends that fit nothing do not matter when they are measured anew."""
    a, b = states()
    data = batches()
    found = measure.interpolate(mlp(), a, b, cross_entropy, data, [0.3], batchnorm="recompute")
    for state in (a, b):
        state["1.running_mean"] += 50
    assert measure.interpolate(mlp(), a, b, cross_entropy, data, [0.3], batchnorm="recompute") == found
    model = mlp()
    model.load_state_dict({n: 0.3 * b[n] + 0.7 * a[n] if a[n].is_floating_point() else a[n] for n in a})
    update_bn(model, data)
    assert found.losses[0] == pytest.approx(evaluated(model.state_dict(), data), rel=1e-5)


def test_statistics_are_recomputed_through_the_loss_function():
    """It alone knows what a batch is."""
    a, b = states()
    loss = lambda model, batch: cross_entropy(model, (batch["image"], batch["label"]))  # noqa: E731
    named = [{"image": x, "label": y} for x, y in batches()]
    found = measure.interpolate(mlp(), a, b, loss, named, [0.3], batchnorm="recompute")
    assert found == measure.interpolate(mlp(), a, b, cross_entropy, batches(), [0.3], batchnorm="recompute")


def test_whole_numbers_are_those_of_the_nearer_end():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.tensor(3))
            self.w = nn.Parameter(torch.zeros(()))

    a, b = Counting(), Counting()
    b.count.fill_(11)
    found = measure.interpolate(
        Counting(),
        a.state_dict(),
        b.state_dict(),
        lambda m, x: m.count.float() + m.w,
        [0],
        [-1.0, 0.0, 0.4, 0.6, 1.0, 2.0],
    )
    assert found.losses == (3.0, 3.0, 3.0, 11.0, 11.0, 11.0)


def test_complex_weights_are_interpolated_too():
    a, b = (Function(lambda w: w.abs().square().sum(), [x], torch.complex64) for x in (1 + 2j, 3 - 2j))
    found = measure.interpolate(a, a.state_dict(), b.state_dict(), value_of, [0], [0.25])
    assert found.losses == (3.25,)  # |1.5 + i|²


def test_a_state_may_hold_what_is_no_tensor():
    class WithExtraState(nn.Linear):
        version = 3

        def get_extra_state(self):
            return {"version": self.version}

        def set_extra_state(self, state):
            self.version = state["version"]

    model, data = WithExtraState(6, 4), batches()
    other = {
        name: 2 * value if isinstance(value, torch.Tensor) else {"version": 7}
        for name, value in model.state_dict().items()
    }
    found = measure.interpolate(model, model.state_dict(), other, cross_entropy, data, [0.0, 1.0])
    assert found.losses[0] != found.losses[1]
    assert model.version == 3


def test_a_frozen_model_can_be_interpolated():
    a, b = states()
    frozen = mlp().requires_grad_(False)
    expected = measure.interpolate(mlp(), a, b, cross_entropy, batches(), [0.5])
    assert measure.interpolate(frozen, a, b, cross_entropy, batches(), [0.5]) == expected


def test_progress_and_json():
    a, b = states()
    told = []
    found = measure.interpolate(
        mlp(), a, b, cross_entropy, batches(), [0.0, 1.0], accuracy_fn=accuracy, progress=lambda *p: told.append(p)
    )
    assert told == [(1, 2), (2, 2)]
    assert Interpolation.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_mismatched_checkpoints_say_which():
    a, b = states()
    run = lambda a, b, **k: measure.interpolate(mlp(), a, b, cross_entropy, batches(), [0.5], **k)  # noqa: E731
    with pytest.raises(ValueError, match=r"state_b is no state of this Sequential: it lacks 7\.bias"):
        run(a, {n: t for n, t in b.items() if n != "7.bias"})
    with pytest.raises(ValueError, match=r"it lacks 0\.bias, 0\.weight, 1\.bias$"):
        run({n: t for n, t in a.items() if n not in ("0.bias", "0.weight", "1.bias")}, b)
    with pytest.raises(ValueError, match=r"it lacks 0\.bias, 0\.weight, 1\.bias and 13 more$"):
        run({}, b)
    with pytest.raises(ValueError, match=r"state_a is no state .* it has, unlike the model, extra"):
        run({**a, "extra": torch.zeros(1)}, b)
    with pytest.raises(ValueError, match=r"state_b\['0.weight'\] has shape \(9, 6\), the model's has \(8, 6\)"):
        run(a, {**b, "0.weight": torch.zeros(9, 6)})
    with pytest.raises(TypeError, match="state_a is a Sequential"):
        run(mlp(), b)
    with pytest.raises(ValueError, match="batchnorm='freeze'"):
        run(a, b, batchnorm="freeze")
    for alphas in ([], [0.5, float("nan")], [0.5, float("inf")]):
        with pytest.raises(ValueError, match=r"alphas=.*: give at least one finite number"):
            measure.interpolate(mlp(), a, b, cross_entropy, batches(), alphas)


def test_a_state_is_made_of_tensors():
    state = mlp().state_dict()
    with pytest.raises(TypeError, match=r"state_b\['0\.weight'\] is a ndarray: give tensors"):
        measure.interpolate(mlp(), state, {n: t.numpy() for n, t in state.items()}, cross_entropy, batches(), [0.5])


@pytest.mark.parametrize("alphas", [0.5, "0.5", ["a"], None])
def test_alphas_are_a_list_of_numbers(alphas):
    a, b = states()
    with pytest.raises(TypeError, match=r"alphas=.*: give a list of numbers, such as \[0.0, 0.5, 1.0\]"):
        measure.interpolate(mlp(), a, b, cross_entropy, batches(), alphas)
