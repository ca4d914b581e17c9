"""Deterministic SmoothOut: the mean over fixed copies, its gradient, its memory, and the loop against vmap."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cases import CASES, assert_same, each_case, snapshot
from smoothout import SmoothOut, SmoothOutEnsemble


def slow_mean(model, loss_fn, batch, thetas, names):
    """Copy the model N times, shift each, average the losses: Eq. 1 to the letter."""
    total, gradients = 0.0, None
    for theta in thetas:
        shifted = copy.deepcopy(model)
        with torch.no_grad():
            for name, p in shifted.named_parameters():
                if name in names:
                    p.copy_(p + theta[names.index(name)])
        loss = loss_fn(shifted, batch)
        loss.backward()
        total += loss.detach() / len(thetas)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad / len(thetas) for p in shifted.parameters()]
        gradients = grads if gradients is None else [a + b for a, b in zip(gradients, grads)]
    return total, gradients


@pytest.mark.parametrize("scale", ["absolute", "filter"])
@pytest.mark.parametrize("chunk", [None, 3, 100])
@each_case
@torch.backends.cudnn.flags(enabled=False)  # its RNNs have no backward in evaluation
def test_loss_and_gradient_equal_eq_1_for_every_model(case, chunk, scale):
    model = case.build().double().eval()
    x = case.batch()
    x = x.double() if x.is_floating_point() else x
    ensemble = SmoothOutEnsemble(model, 5, 0.2, scale=scale, seed=4, chunk=chunk)
    names = [s.name for s in ensemble._perturbation.selected]
    thetas = [ensemble._perturbation.draw(0.2, 0, i) for i in range(5)]
    expected, gradients = slow_mean(model, case.loss, x, thetas, names)
    before = snapshot(model)
    loss = ensemble.loss(case.loss, x)
    (2 * loss).backward()
    assert_same(model, before, buffers=True)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=1e-9)
    for p, g in zip(model.parameters(), gradients):
        if p.requires_grad:
            torch.testing.assert_close(p.grad, 2 * g, rtol=1e-5, atol=1e-8)
    with torch.no_grad():
        torch.testing.assert_close(ensemble.loss(case.loss, x), loss.detach(), rtol=1e-6, atol=1e-9)


def test_the_copies_are_fixed_and_the_loss_is_deterministic():
    case = CASES["mlp"]
    model, x = case.build(), case.batch()
    first = SmoothOutEnsemble(model, 4, seed=1).loss(case.loss, x)
    assert torch.equal(first, SmoothOutEnsemble(model, 4, seed=1).loss(case.loss, x))
    assert not torch.equal(first, SmoothOutEnsemble(model, 4, seed=2).loss(case.loss, x))


def test_it_is_the_objective_that_the_stochastic_form_samples():
    case = CASES["mlp"]
    model, x = case.build().double(), case.batch().double()
    smooth = SmoothOut(model, 0.3, seed=1)
    with smooth.samples(64) as draws:
        losses = [case.loss(model, x).item() for _ in draws]
    ensemble = SmoothOutEnsemble(model, 64, 0.3, seed=1)
    assert ensemble.loss(case.loss, x).item() == pytest.approx(sum(losses) / 64, rel=1e-6)


def test_vmap_is_used_where_the_model_allows_it_and_the_loop_elsewhere():
    batch = (torch.randn(6, 8), torch.randint(3, (6,)))

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    calls = []
    mlp = nn.Sequential(nn.Linear(8, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    mlp.register_forward_hook(lambda *_: calls.append(1))
    SmoothOutEnsemble(mlp, 8, chunk=4).loss(loss, batch).backward()
    assert len(calls) == 2  # two chunks of four

    with_bn = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    calls.clear()
    with_bn.register_forward_hook(lambda *_: calls.append(1))
    SmoothOutEnsemble(with_bn, 8, chunk=4).loss(loss, batch).backward()
    assert len(calls) == 8
    assert with_bn[1].num_batches_tracked == 8  # noisy forwards update the statistics, as everywhere

    class Branches(nn.Module):
        """Control flow on values: vmap cannot, the loop can."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x):
            y = self.layer(x)
            return y if y.sum() > 0 else -y

    ensemble = SmoothOutEnsemble(Branches(), 4, chunk=2)
    ensemble.loss(loss, batch).backward()
    assert not ensemble._vmap_works


@pytest.mark.parametrize("fails_later", [False, True])
def test_a_buffer_that_a_forward_replaces_is_what_the_loop_makes_it(fails_later):
    """A running mean, such as DINO's center: vmap would leave one of all copies at once in the model."""

    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(8, 3)
            self.register_buffer("center", torch.zeros(3))

        def forward(self, x):
            y = self.layer(x)
            self.center = 0.9 * self.center + 0.1 * y.detach().mean(0)
            return (y - self.center) * (1.0 if not fails_later or y.sum() > 0 else -1.0)

    one_by_one, at_once = Centred(), Centred()
    x = torch.randn(6, 8)
    for model, chunk in ((one_by_one, 1), (at_once, 2)):
        SmoothOutEnsemble(model, 4, 0.1, chunk=chunk).loss(lambda model, x: model(x).square().mean(), x).backward()
    assert torch.equal(one_by_one.center, at_once.center)
    for p, q in zip(one_by_one.parameters(), at_once.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.filterwarnings("ignore")  # torch's own, of what the compiler leaves alone
def test_a_compiled_step():
    torch.manual_seed(0)
    model, batch = nn.Linear(8, 3), (torch.randn(6, 8), torch.randint(3, (6,)))
    ensemble = SmoothOutEnsemble(model, 3, 0.1)

    def step():
        model.zero_grad()
        loss = ensemble.loss(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batch)
        loss.backward()
        return loss.detach(), model.weight.grad.clone()

    for compiled, plain in zip(torch.compile(step, backend="eager")(), step(), strict=True):
        torch.testing.assert_close(compiled, plain)


def test_a_gradient_scaler_scales_inside_the_loss():
    """fp16 loses gradients this small (2⁻²⁴ is its least number) if the scaler comes after they were taken."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), torch.randn(5, 4)
    ensemble, scaler = SmoothOutEnsemble(model, 2, 0.01), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = ensemble.loss(lambda model, x: scaler.scale(1e-9 * model(x).float().sum()), x)
    loss.backward()
    scaler.unscale_(torch.optim.SGD(model.parameters(), 0.1))
    assert all(p.grad.any() for p in model.parameters())


def test_memory_grows_with_the_chunk_not_with_the_copies():
    class Probe(nn.Module):
        """Counts the activations that are alive at once."""

        def __init__(self):
            super().__init__()
            self.layer, self.alive, self.peak = nn.Linear(4, 4), 0, 0

        def forward(self, x):
            import weakref

            y = self.layer(x)
            kept = y * y
            self.alive += 1
            self.peak = max(self.peak, self.alive)
            weakref.finalize(kept, self._gone)
            return kept

        def _gone(self):
            self.alive -= 1

    for copies in (2, 20):
        model = Probe()
        SmoothOutEnsemble(model, copies).loss(lambda m, x: m(x).sum(), torch.randn(3, 4)).backward()
        assert model.peak <= 2


def test_parameters_frozen_later_keep_their_noise():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    ensemble, x = SmoothOutEnsemble(model, 3, strength=0.5), torch.randn(5, 4)

    def loss():
        return ensemble.loss(lambda m, x: m(x).square().mean(), x).item()

    expected = loss()
    model[0].requires_grad_(False)
    assert loss() == pytest.approx(expected, rel=1e-6)
    model.requires_grad_(False)  # as for an evaluation
    assert loss() == pytest.approx(expected, rel=1e-6)


def test_bad_input():
    model = nn.Linear(2, 2)
    for bad in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=f"copies={bad}"):
            SmoothOutEnsemble(model, bad)
    with pytest.raises(ValueError, match="chunk=0"):
        SmoothOutEnsemble(model, 2, chunk=0)
    with pytest.raises(ValueError, match="strength=-1"):
        SmoothOutEnsemble(model, 2, strength=-1)
    with pytest.raises(ValueError, match=r"of shape \(2, 2\): give a scalar"):
        SmoothOutEnsemble(model, 2).loss(lambda m, x: m(x), torch.randn(2, 2))
    loss = SmoothOutEnsemble(model, 2).loss(lambda m, x: m(x).sum(), torch.randn(2, 2))
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(loss, model.weight, create_graph=True)


def test_only_the_models_parameters_get_gradients_and_that_is_said():
    ensemble, x = SmoothOutEnsemble(nn.Linear(4, 3), 2), torch.randn(2, 4, requires_grad=True)
    with pytest.raises(ValueError, match="batch holds a tensor that requires a gradient"):
        ensemble.loss(lambda model, batch: model(batch).sum(), x)
    with torch.no_grad():
        ensemble.loss(lambda model, batch: model(batch).sum(), x)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        hidden = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False)
        return self.last(hidden)


@pytest.mark.parametrize("chunk", [None, 4])
def test_activation_checkpointing_recomputes_at_the_shifted_weights(chunk):
    model, x = Checkpointed(), torch.randn(8, 4)
    ensemble = SmoothOutEnsemble(model, 6, 0.5, chunk=chunk)
    names = [s.name for s in ensemble._perturbation.selected]
    thetas = [ensemble._perturbation.draw(0.5, 0, i) for i in range(6)]

    def loss_fn(model, batch):
        return model(batch).square().mean()

    loss, gradients = slow_mean(model, loss_fn, x, thetas, names)
    ours = ensemble.loss(loss_fn, x)
    ours.backward()
    torch.testing.assert_close(ours.detach(), loss)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient)


@pytest.mark.parametrize("chunk", [None, 128])
def test_many_copies_in_half_precision_are_summed_in_single(chunk):
    torch.manual_seed(0)
    model = nn.Linear(4, 3, dtype=torch.bfloat16)
    twin = nn.Linear(4, 3)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(16, 4)
    results = []
    for each, dtype in ((model, torch.bfloat16), (twin, torch.float32)):
        loss = SmoothOutEnsemble(each, 512, 0.1, chunk=chunk).loss(
            lambda m, b: m(b).float().square().mean(), x.to(dtype)
        )
        loss.backward()
        results.append((loss.item(), each.weight.grad.float()))
        assert each.weight.grad.dtype == dtype
    assert results[0][0] == pytest.approx(results[1][0], rel=0.01)
    assert (results[0][1] - results[1][1]).norm() < 0.02 * results[1][1].norm()


def test_an_attached_model_takes_no_noise_beside_the_copies_own():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(5, 4)
    results = []
    for attached in (False, True):
        model.zero_grad()
        if attached:
            SmoothOut(model, 0.3).attach(torch.optim.SGD(model.parameters(), lr=0.1))
        loss = SmoothOutEnsemble(model, 4).loss(lambda model, batch: model(batch).square().mean(), x)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
