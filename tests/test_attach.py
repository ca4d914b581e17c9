"""attach(): an unchanged loop trains as the explicit one does, and finds clean weights everywhere else."""

import copy
import gc
import math
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.utils import stateless
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.checkpoint import checkpoint

from cases import assert_equal_models, assert_moved, assert_same, snapshot
from smoothout import AdaSmoothOut, SmoothOut
from smoothout.perturb import Perturbation


class Mlp(nn.Module):
    """Not a container of torch's own: the compiler treats those differently."""

    def __init__(self):
        super().__init__()
        self.layers = sequential()

    def forward(self, x):
        return self.layers(x)


def sequential():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batches(n, size=8):
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    return [(torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)) for _ in range(n)]


def squared_error(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def plain_loop(model, optimizer, data, call=None):
    for batch in data:
        squared_error(model if call is None else call, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def explicit_loop(model, optimizer, data, smooth):
    for batch in data:
        with smooth.perturbed():
            squared_error(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def twins():
    """A model trained by the explicit loop, and its untrained twin."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    expected = Mlp()
    model = copy.deepcopy(expected)
    torch.manual_seed(5)
    explicit_loop(expected, sgd(expected), batches(20), AdaSmoothOut(expected, 0.3, seed=2))
    torch.manual_seed(5)
    return model, expected


def test_an_unchanged_loop_equals_the_explicit_one_bit_for_bit(twins):
    model, expected = twins
    optimizer = sgd(model)
    smooth = AdaSmoothOut(model, 0.3, seed=2)
    smooth.attach(optimizer)
    plain_loop(model, optimizer, batches(20))
    assert_equal_models(model, expected)
    assert smooth.step_count == 20


def test_step_with_a_closure(twins):
    """As Lightning does it: forward and backward run inside step()."""
    model, expected = twins
    optimizer = sgd(model)
    AdaSmoothOut(model, 0.3, seed=2).attach(optimizer)
    for batch in batches(20):

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = squared_error(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return loss

        optimizer.step(closure)
    assert_equal_models(model, expected)


@pytest.mark.parametrize("build", [Mlp, sequential])
@pytest.mark.parametrize(
    "order", ["attach, compile", "compile, attach", "compile, call, attach", "attach to compiled", "in place later"]
)
def test_compiled_models_train_alike_or_raise(build, order):
    torch._dynamo.reset()
    torch.manual_seed(0)
    expected = build()
    model = copy.deepcopy(expected)
    for m in (model, expected):
        next(x for x in m.modules() if isinstance(x, nn.Dropout)).p = 0.0
    explicit_loop(expected, sgd(expected), batches(10), AdaSmoothOut(expected, 0.3, seed=2))
    optimizer = sgd(model)

    def attach(m=model):
        AdaSmoothOut(m, 0.3, seed=2).attach(optimizer)

    def compiled():
        return torch.compile(model, backend="aot_eager")

    if order == "attach, compile":
        attach()
        call = compiled()
    elif order == "attach to compiled":
        attach(call := compiled())
    elif order == "in place later":
        attach()
        model.compile(backend="aot_eager")
        call = model
    else:
        call = compiled()
        if order == "compile, call, attach":
            state = copy.deepcopy(model.state_dict())
            squared_error(call, batches(1)[0]).backward()
            optimizer.zero_grad()
            model.load_state_dict(state)
        if build is sequential:
            with pytest.raises(ValueError, match="give SmoothOut the compiled model"):
                attach()
            return
        attach()
    plain_loop(model, optimizer, batches(10), call)
    for a, b in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_model_compiled_in_place_is_refused():
    model = Mlp()
    model.compile(backend="aot_eager")
    with pytest.raises(ValueError, match="compiled in place"):
        SmoothOut(model).attach(sgd(model))


def test_clean_weights_between_backward_and_step_and_after_a_skipped_step():
    model = Mlp()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    smooth = SmoothOut(model, 0.5)
    smooth.attach(optimizer)
    for step, batch in enumerate(batches(4)):
        before = snapshot(model)
        scaler.scale(squared_error(model, batch)).backward()
        assert_same(model, before)
        if step == 1:
            model.layers[0].weight.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 1:
            assert_same(model, before)
    assert smooth.step_count == 3  # the skipped step was none


def test_one_theta_per_step_or_per_forward():
    model = nn.Linear(6, 3)
    optimizer = sgd(model)
    seen = []
    model.register_forward_hook(lambda m, *_: seen.append(m.weight.detach().clone()))
    for draw, distinct in (("step", 1), ("forward", 3)):
        smooth = SmoothOut(model, 0.5)
        handle = smooth.attach(optimizer, draw=draw)
        seen.clear()
        for batch in batches(3):
            squared_error(model, batch).backward()
        assert len({tuple(w.flatten().tolist()) for w in seen}) == distinct
        optimizer.step()
        theta = smooth.perturbation.draw(0.5, 1, 0)[0]
        clean = model.weight.detach().clone()
        squared_error(model, batches(1)[0]).backward()
        assert torch.equal(seen[-1], clean + theta)
        handle.remove()


def test_accumulation_equals_one_batch():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    twin = copy.deepcopy(model)
    x, y = (t.double() for t in batches(1, size=32)[0])
    for m, parts in ((model, 1), (twin, 4)):
        SmoothOut(m, 0.3).attach(sgd(m))
        for part in zip(x.chunk(parts), y.chunk(parts)):
            (squared_error(m, part) / parts).backward()
    for a, b in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-15)


def test_passes_without_gradients_see_clean_weights_at_any_time():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x, y = batches(1)[0]
    SmoothOut(model, 0.5).attach(sgd(model))
    before = snapshot(model)
    with torch.no_grad():
        clean, clean_part = model(x), model[0](x)  # in training mode
    assert_same(model, before)
    pending = squared_error(model, (x, y))
    noisy = model[0].weight.detach().clone()
    assert not torch.equal(noisy, before["0.weight"][0])
    with torch.no_grad():
        assert torch.equal(model(x), clean)
        assert torch.equal(model[0](x), clean_part)  # a part of the model too
    assert torch.equal(model[0](x), nn.functional.linear(x, noisy, model[0].bias))  # with gradients, under the noise
    assert torch.equal(model[0].weight, noisy)
    assert torch.equal(model.state_dict()["0.weight"], before["0.weight"][0])
    assert torch.equal(model[0].state_dict()["weight"], before["0.weight"][0])
    pending.backward()  # and the pending backward is none the wiser
    assert_same(model, before)


def test_the_pending_gradient_is_not_disturbed_by_a_pass_without_gradients():
    x, y = batches(1)[0]
    gradients = []
    for disturb in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        SmoothOut(model, 0.5).attach(sgd(model))
        loss = squared_error(model, (x, y))
        if disturb:
            with torch.no_grad():
                model(x)
            with pytest.raises(RuntimeError), torch.no_grad():  # a failing pass too
                model(x[:, :2])
        loss.backward()
        gradients.append(model[0].weight.grad)
    assert torch.equal(*gradients)


def test_an_evaluation_with_gradients_gives_the_pending_forward_up():
    model = Mlp()
    x, y = batches(1)[0]
    before = snapshot(model)
    SmoothOut(model, 0.5).attach(sgd(model))
    pending = squared_error(model, (x, y))
    model.eval()
    squared_error(model, (x, y)).backward()
    assert_same(model, before)
    with pytest.raises(RuntimeError, match="noise is gone"):
        pending.backward()


def test_a_forward_without_backward_is_taken_back():
    model = Mlp()
    optimizer = sgd(model)
    handle = SmoothOut(model, 0.5).attach(optimizer)
    before = snapshot(model)
    kept = model(batches(1)[0][0])
    assert not torch.equal(model.layers[0].weight, before["layers.0.weight"][0])
    handle.restore()
    assert_same(model, before)
    handle.restore()
    del kept
    model(batches(1)[0][0])
    optimizer.step()  # no gradients: nothing to update, but the noise must go
    assert_same(model, before)
    with torch.no_grad():
        model(batches(1)[0][0])
    assert_same(model, before)


def test_a_forward_that_is_a_generator_is_refused():
    class Exits(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                yield x

    model = Exits()
    before = snapshot(model)
    SmoothOut(model, 0.3).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="the forward of Exits gives a generator"):
        model(torch.randn(2, 4))
    assert_same(model, before)
    with torch.no_grad():
        assert len(list(model(torch.randn(2, 4)))) == 2


def test_an_exception_in_forward_or_backward():
    model = Mlp()
    before = snapshot(model)
    optimizer, smooth = sgd(model), SmoothOut(model, 0.5)
    smooth.attach(optimizer)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(3, 5))
    assert_same(model, before)
    with pytest.warns(UserWarning, match="without a perturbed forward since the last step"):
        optimizer.step()
    assert smooth.step_count == 0
    out = model(batches(1)[0][0])
    out.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    squared_error(model, batches(1)[0]).backward()  # the loop goes on, and the weights come back
    assert_same(model, before)


def test_checkpointed_models(twins):
    model, expected = twins
    optimizer = sgd(model)
    AdaSmoothOut(model, 0.3, seed=2).attach(optimizer)
    for x, y in batches(20):
        (checkpoint(model, x, use_reentrant=False) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, model.parameters(), expected.parameters()))  # statistics have seen each batch twice


def test_reentrant_checkpointing_of_the_whole_model_is_refused():
    model = Mlp()
    before = snapshot(model)
    SmoothOut(model, 0.3).attach(sgd(model))
    x = torch.randn(4, 6, requires_grad=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        checkpoint(model, x, use_reentrant=True).sum().backward()
    assert_same(model, before)
    plain = Mlp()
    SmoothOut(plain, 0.0).attach(sgd(plain))
    checkpoint(plain, x, use_reentrant=True).sum().backward()  # no noise, no matter


def test_a_second_backward_through_one_forward_raises():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    SmoothOut(model, 0.3).attach(sgd(model))
    loss = squared_error(model, batches(1)[0])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="noise is gone"):
        loss.backward()


def test_two_forwards_one_backward():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    twin = copy.deepcopy(model)
    before = snapshot(model)
    first, second = batches(2)
    SmoothOut(model, 0.3).attach(sgd(model))
    (squared_error(model, first) + squared_error(model, second)).backward()
    assert_same(model, before)
    with SmoothOut(twin, 0.3).perturbed():
        (squared_error(twin, first) + squared_error(twin, second)).backward()
    assert torch.equal(model[0].weight.grad, twin[0].weight.grad)


def test_a_pass_without_gradients_inside_a_forward_sees_its_noise():
    class Looks(nn.Sequential):
        def forward(self, x):
            y = self[0](x)
            with torch.no_grad():
                assert torch.equal(self[0](x), y)
            return y

    model = Looks(nn.Linear(6, 3))
    SmoothOut(model, 0.5).attach(sgd(model))
    first, second = batches(2)
    (squared_error(model, first) + squared_error(model, second)).backward()


def test_two_optimizers():
    model = Mlp()
    expected = copy.deepcopy(model)
    smooth, explicit = SmoothOut(model, 0.3), SmoothOut(expected, 0.3)
    pairs = []
    for m in (model, expected):
        first, others = m.layers[0].parameters(), m.layers[1:].parameters()
        pairs.append([torch.optim.SGD(first, 0.1), torch.optim.Adam(others, 0.01)])
    smooth.attach(pairs[0][0])
    smooth.attach(pairs[0][1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(1)
        for batch in batches(6):
            squared_error(model, batch).backward()
            for optimizer in pairs[0]:
                optimizer.step()
                optimizer.zero_grad()
    torch.manual_seed(1)
    for batch in batches(6):
        with explicit.perturbed():
            squared_error(expected, batch).backward()
        for optimizer in pairs[1]:
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_models(model, expected)
    assert smooth.step_count == 6


def test_a_root_whose_forward_is_never_called_is_named_once():
    model = Mlp()
    optimizer = sgd(model)
    SmoothOut(model).attach(optimizer)
    with pytest.warns(UserWarning, match="attached to Mlp, whose forward was not called"):
        plain_loop(model, optimizer, batches(1), call=model.layers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain_loop(model, optimizer, batches(2), call=model.layers)


def test_a_root_that_is_not_called_any_more_is_named():
    model = Mlp()
    optimizer = sgd(model)
    SmoothOut(model).attach(optimizer)
    plain_loop(model, optimizer, batches(1))
    with pytest.warns(UserWarning, match="attached to Mlp, whose forward was not called"):
        plain_loop(model, optimizer, batches(1), call=model.layers)


def test_without_denoising_and_a_theta_for_each_forward_they_add_up():
    model = nn.Linear(6, 3)
    clean, smooth = model.weight.detach().clone(), SmoothOut(model, 0.3, denoise=False)
    first, second = (smooth.perturbation.draw(0.3, 0, i)[0] for i in range(2))
    smooth.attach(sgd(model), draw="forward")
    for batch in batches(2):
        squared_error(model, batch).backward()
    assert torch.equal(model.weight, clean + first + second)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_without_denoising_a_step_starts_from_noisy_weights_and_has_one_theta(micro_batches):
    model = nn.Linear(6, 3)
    twin = copy.deepcopy(model)
    optimizer, other = sgd(model), sgd(twin)
    SmoothOut(model, 0.3, denoise=False).attach(optimizer)
    explicit = SmoothOut(twin, 0.3, denoise=False)
    data = batches(6)
    for first in range(0, len(data), micro_batches):
        of_a_step = data[first : first + micro_batches]
        for batch in of_a_step:
            squared_error(model, batch).backward()
        with explicit.perturbed():
            for batch in of_a_step:
                squared_error(twin, batch).backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
        assert_equal_models(model, twin)


def test_a_gradient_after_an_interrupted_evaluation_is_that_of_the_noisy_weights():
    class Interrupts(nn.Module):
        now = False

        def forward(self, x):
            if self.now:
                raise KeyboardInterrupt
            return x

    model = nn.Sequential(nn.Linear(6, 8), Interrupts(), nn.Linear(8, 3))
    twin, (batch,) = copy.deepcopy(model), batches(1)
    handle = SmoothOut(model, 0.5).attach(sgd(model))
    loss = squared_error(model, batch)
    model[1].now = True
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(batch[0])
    loss.backward()
    with SmoothOut(twin, 0.5).perturbed():
        squared_error(twin, batch).backward()
    assert_equal_models(model, twin)
    for p, q in zip(model.parameters(), twin.parameters()):
        assert torch.equal(p.grad, q.grad)
    model[1].now = False
    model(batch[0])
    model[1].now = True
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(batch[0])
    handle.restore()
    model[1].now = False
    pending = model(batch[0])  # holds the noise
    with torch.no_grad():  # and the next evaluation is that of the clean ones
        assert torch.equal(model(batch[0]), twin(batch[0]))
    pending.sum().backward()


def test_a_backward_that_recomputes_without_gradients_sees_the_noise():
    class Recomputes(torch.autograd.Function):  # as reversible networks do
        @staticmethod
        def forward(ctx, x, layer):
            ctx.layer, ctx.x, ctx.y = layer, x, layer(x)
            return ctx.y.clone()

        @staticmethod
        def backward(ctx, gradient):
            with torch.no_grad():
                assert torch.equal(ctx.layer(ctx.x), ctx.y)
            return torch.zeros_like(ctx.x), None

    class Reversible(nn.Sequential):
        def forward(self, x):
            return Recomputes.apply(self[0](x), self[1])

    model = Reversible(nn.Linear(6, 8), nn.Linear(8, 3))
    SmoothOut(model, 0.5).attach(sgd(model))
    squared_error(model, batches(1)[0]).backward()


def test_a_compiled_function_around_the_model_sees_hooks_that_come_later():
    model = Mlp()
    call = torch.compile(lambda x: model(x).sum(), backend="eager")
    (x, _), *_ = batches(1)
    call(x)
    optimizer = sgd(model)
    smooth = SmoothOut(model, 0.1)
    smooth.attach(optimizer)
    for _ in range(2):
        call(x).backward()
        optimizer.step()
    assert smooth.step_count == 2


def test_resume_in_the_middle_of_an_accumulation():
    def run(split):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = sgd(model)
        smooth = SmoothOut(model, 0.5)
        smooth.attach(optimizer, draw="forward")
        for i, batch in enumerate(batches(8)):
            if i == split:
                state = smooth.state_dict()
                smooth._attachment.remove()
                smooth = SmoothOut(model, 0.5, seed=9)
                smooth.load_state_dict(state)
                smooth.attach(optimizer, draw="forward")
            squared_error(model, batch).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        return model.weight.detach()

    assert torch.equal(run(split=None), run(split=6))


def test_remove_leaves_no_trace():
    model = Mlp()
    optimizer = sgd(model)

    def hooks():
        return [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._state_dict_hooks), len(m._backward_hooks))
            for m in model.modules()
        ] + [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]

    nothing = hooks()
    twin = copy.deepcopy(model)
    smooth = SmoothOut(model, 0.5)
    handle = smooth.attach(optimizer)
    assert hooks() != nothing
    model(batches(1)[0][0])  # pending
    handle.remove()
    assert hooks() == nothing
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks
    model.load_state_dict(twin.state_dict())
    torch.manual_seed(1)
    plain_loop(model, optimizer, batches(3))
    torch.manual_seed(1)
    plain_loop(twin, sgd(twin), batches(3))
    assert_equal_models(model, twin)
    gone = weakref.ref(smooth)
    del smooth, handle
    gc.collect()
    assert gone() is None


def test_what_is_thrown_away_without_remove_leaves_no_global_hooks():
    def hooks():
        gc.collect()
        everywhere = torch.nn.modules.module
        return [
            len(each)
            for each in (
                everywhere._global_forward_pre_hooks,
                everywhere._global_forward_hooks,
                _global_optimizer_post_hooks,
            )
        ]

    nothing, model = hooks(), nn.Linear(6, 3)
    optimizer = sgd(model)
    handle = SmoothOut(model, 0.5).attach(optimizer)
    model(batches(1)[0][0])  # pending
    assert min(now - before for now, before in zip(hooks(), nothing)) > 0
    del model, optimizer, handle
    assert hooks() == nothing


def test_after_remove_there_is_perturbed_again_and_another_attach():
    model = nn.Linear(6, 3)
    optimizer, smooth, before = sgd(model), SmoothOut(model, 0.5), snapshot(model)
    first = smooth.attach(optimizer)
    first.remove()
    with smooth.perturbed():
        assert_moved(model, before, smooth)
    handle = smooth.attach(optimizer, draw="forward")
    assert handle is not first
    loss = squared_error(model, batches(1)[0])
    assert_moved(model, before, smooth)
    loss.backward()
    assert_same(model, before)


def test_what_cannot_be_attached_is_refused_in_words():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="LBFGS evaluates its closure at several points"):
        SmoothOut(model).attach(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match="optimizer is a int"):
        SmoothOut(model).attach([3])
    with pytest.raises(ValueError, match="draw='epoch'"):
        SmoothOut(model).attach(sgd(model), draw="epoch")
    smooth = SmoothOut(model)
    handle = smooth.attach(sgd(model))
    with pytest.raises(ValueError, match="attached with draw='step'"):
        smooth.attach(sgd(model), draw="forward")
    with pytest.raises(RuntimeError, match="the hooks do it already"), smooth.perturbed():
        pass
    with pytest.raises(RuntimeError, match="another SmoothOut is attached to these weights"):
        SmoothOut(model).attach(sgd(model))
    assert smooth.attach(sgd(model)) is handle  # another optimizer for the same one
    handle.remove()
    SmoothOut(model).attach(sgd(model)).remove()
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match="steps inside the backward"):
        SmoothOut(model).attach(sgd(model))
    other = nn.Linear(2, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, other.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match="steps inside the backward"):
        SmoothOut(other).attach(other.weight._in_backward_optimizers)


def test_an_attached_optimizer_that_steps_inside_the_backward_is_refused_then():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer, before = sgd(model), snapshot(model)
    SmoothOut(model, 0.1).attach(optimizer)
    last = model[1].weight.expand_as(model[1].weight).grad_fn.next_functions[0][0]  # the node that accumulates
    last.register_hook(lambda *_: optimizer.step())
    with pytest.raises(RuntimeError, match="steps inside the backward"):
        model(torch.randn(3, 2)).sum().backward()
    assert_same(model, before)


class OneColumn(nn.Linear):
    def forward(self, x):
        return super().forward(x)[:, 0]


@pytest.mark.parametrize("how", ["attached", "late"])
def test_an_output_that_is_a_view_may_be_changed_in_place(how):
    model = OneColumn(6, 3)
    smooth, before, (x, _) = SmoothOut(model, 0.5), snapshot(model), batches(1)[0]
    if how == "attached":
        smooth.attach(sgd(model))
        out = model(x)
    else:
        with smooth.perturbed():
            out = checkpoint(model, x, use_reentrant=False)
    out /= 2.0
    if how == "attached":
        out.sum().backward()
    else:
        with pytest.raises(RuntimeError, match="whose noise is gone by now"):
            out.sum().backward()
    assert_same(model, before)


def test_an_input_that_is_handed_on_as_a_view_may_be_differentiated_elsewhere():
    class HandsOn(nn.Linear):
        def forward(self, x):
            return super().forward(x), x.view(-1)

    model, z = HandsOn(6, 3), torch.randn(4, 6, requires_grad=True)
    SmoothOut(model, 0.5).attach(sgd(model))
    x = z * 2
    out, _ = model(x)
    out.sum().backward(retain_graph=True)
    x.sum().backward()  # not the model's affair


def test_an_optimizer_that_steps_inside_the_backward_is_noticed_later_too():
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    before = snapshot(model)
    SmoothOut(model, 0.1).attach(optimizer)

    @torch.no_grad()
    def step_in_backward(p):
        p.sub_(0.1 * p.grad)

    model.weight.register_post_accumulate_grad_hook(step_in_backward)
    with pytest.raises(RuntimeError, match="weight was written while noise was applied"):
        model(torch.randn(3, 2)).sum().backward()
    assert_same(model, before)


def test_a_refused_optimizer_leaves_no_hooks():
    model = nn.Linear(6, 3)
    smooth, before = SmoothOut(model, 0.5), snapshot(model)
    for bad in (torch.optim.LBFGS(model.parameters()), [sgd(model), 3], 3):
        with pytest.raises((ValueError, TypeError), match=r"LBFGS|optimizer is a int"):
            smooth.attach(bad)
    model(batches(1)[0][0])
    assert_same(model, before)
    with smooth.perturbed():
        pass
    handle = smooth.attach(sgd(model))
    with pytest.raises(ValueError, match="LBFGS"):
        smooth.attach(torch.optim.LBFGS(model.parameters()))
    assert not handle.removed


def test_copies_of_an_attached_model_take_no_noise(tmp_path):
    model = Mlp()
    optimizer = sgd(model)
    smooth = SmoothOut(model, 0.5)
    smooth.attach(optimizer)
    average = torch.optim.swa_utils.AveragedModel(model)
    plain_loop(model, optimizer, batches(1))
    average.update_parameters(model)
    torch.save(model, tmp_path / "model.pt")
    for twin in (average, torch.load(tmp_path / "model.pt", weights_only=False)):
        before, original = snapshot(twin), snapshot(model)
        twin.train()
        twin(batches(1)[0][0])  # would perturb, were it attached
        assert_same(twin, before)
        assert_same(model, original)


def test_an_evaluation_after_an_interrupted_forward_is_clean():
    class Interrupted(Mlp):
        def forward(self, x):
            y = super().forward(x)
            if self.training and torch.is_grad_enabled():
                with torch.no_grad():  # a pass of the model inside its own forward sees the same noise
                    assert torch.equal(self(x), y)
                raise KeyboardInterrupt
            return y

    model = Interrupted()
    model.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x = batches(1)[0][0]
    clean = model.eval()(x)
    before = snapshot(model)
    SmoothOut(model, 0.5).attach(sgd(model))
    with pytest.raises(KeyboardInterrupt):
        model.train()(x)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), clean)
    assert_same(model, before)


@pytest.mark.parametrize("part", ["model", "layer"])
def test_weights_loaded_while_a_backward_is_pending_stay(part):
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), batches(1)[0][0]
    optimizer = sgd(model)
    SmoothOut(model, 0.5).attach(optimizer)
    clean = copy.deepcopy(model)
    loss = model(x).sum()  # Ctrl-C before its backward has ended, then another checkpoint
    for module in (model, clean):
        target = module if part == "model" else module[0]
        target.load_state_dict({name: 2 * values for name, values in target.state_dict().items()})
    with torch.no_grad():
        assert torch.equal(model.eval()(x), clean.eval()(x))
    assert_equal_models(model, clean)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|noise is gone"):
        loss.backward()
    plain_loop(model.train(), optimizer, batches(1))


def test_a_functional_call_with_other_tensors_is_refused_and_touches_nothing():
    model, x = Mlp(), batches(1)[0][0]
    optimizer = sgd(model)
    smooth = SmoothOut(model, 0.5)
    smooth.attach(optimizer)
    before = snapshot(model)
    fast = {name: 2 * p for name, p in model.named_parameters()}
    others = {name: nn.Parameter(2 * p.detach()) for name, p in model.named_parameters()}
    detached = {name: p.detach() for name, p in model.named_parameters()}
    for lent in (fast, others):
        with pytest.raises(RuntimeError, match="functional_call gave"):
            torch.func.functional_call(model, lent, (x,))
        assert all(torch.equal(lent[name], 2 * p) for name, p in model.named_parameters())
    with pytest.raises(RuntimeError, match="functional_call gave"):
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(detached)
    with stateless._reparametrize_module(model, fast), pytest.raises(RuntimeError, match="functional_call gave"):
        model(x)  # lent by other ways, as libraries for meta-learning do
    torch.func.functional_call(model, dict(model.named_parameters()), (x,)).sum().backward()
    assert_same(model, before)
    optimizer.step()
    assert smooth.step_count == 1


def test_with_strength_zero_backwards_may_come_late_and_twice():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    smooth = SmoothOut(model, 0.0)
    smooth.attach(sgd(model), draw="forward")
    first, second = (squared_error(model, batch) for batch in batches(2))
    (first + second).backward(retain_graph=True)
    first.backward()
    late = checkpoint(model, batches(1)[0][0], use_reentrant=False).sum()
    smooth.strength = 0.5
    model(batches(1)[0][0])
    with pytest.raises(RuntimeError, match="noise is gone"):  # it would recompute at noisy weights
        late.backward()


def test_a_step_that_calls_its_base_classs_is_one_step():
    class Derived(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = nn.Linear(6, 3)
    optimizer = Derived(model.parameters(), 0.1)
    smooth = SmoothOut(model)
    smooth.attach(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain_loop(model, optimizer, batches(3))
    assert smooth.step_count == 3


# ---- optimizers that are not attached --------------------------------------------------------------------------------


def test_an_optimizer_made_anew_is_noticed_once():
    model = nn.Linear(4, 3)
    smooth = SmoothOut(model, 0.1)
    smooth.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    anew = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).sum().backward()
    with pytest.warns(UserWarning, match="a SGD that is not attached stepped on Linear.*new ones too"):
        anew.step()
    model(torch.randn(2, 4)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        anew.step()
    smooth.attach(anew)
    before = smooth.step_count
    model(torch.randn(2, 4)).sum().backward()
    anew.step()
    assert smooth.step_count == before + 1


def test_steps_on_other_models_and_inside_an_attached_step_are_not_the_point(recwarn):
    class Outer(torch.optim.Optimizer):
        def __init__(self, parameters):
            self.base_optimizer = torch.optim.SGD(parameters, lr=0.1)
            super().__init__(self.base_optimizer.param_groups, {})

        def step(self):
            self.base_optimizer.step()

    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    smooth, outer = SmoothOut(model, 0.1), Outer(list(model.parameters()))
    handle = smooth.attach(outer)
    of_other = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()
        other(torch.randn(2, 4)).sum().backward()
        of_other.step()
        outer.step()
    handle.remove()
    model(torch.randn(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert smooth.step_count == 2
    assert not recwarn.list


def test_no_optimizer_and_one_of_another_model():
    model = nn.Linear(4, 3)
    with pytest.raises(ValueError, match="optimizer is empty"):
        SmoothOut(model).attach([])
    with pytest.warns(UserWarning, match="holds none of Linear's parameters.*of another model"):
        SmoothOut(model).attach(torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.1))


def test_an_interrupt_while_a_backward_takes_the_noise_back_leaves_none(monkeypatch):
    def interrupt(perturbation):
        monkeypatch.undo()
        raise KeyboardInterrupt

    model = nn.Linear(6, 3)
    SmoothOut(model, 0.3).attach(torch.optim.SGD(model.parameters(), 0.1))
    before = [p.detach().clone() for p in model.parameters()]
    monkeypatch.setattr(Perturbation, "_bring_back_moved", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(2, 6)).sum().backward()
    assert all(map(torch.equal, model.parameters(), before))


def test_an_interrupt_after_the_forward_leaves_no_noisy_evaluation():
    """While the hooks of the clean passes are put up, for which the modules are gone through."""

    class Interrupted(nn.Sequential):
        interrupt = False

        def modules(self):
            if self.interrupt:
                self.interrupt = False
                raise KeyboardInterrupt
            return super().modules()

    model, x = Interrupted(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    SmoothOut(model, 0.3).attach(optimizer)
    with torch.no_grad():
        clean = model(x)
    model.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        model(x).sum().backward()
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), clean)


@pytest.mark.parametrize("how", ["in the optimizer already", "a group of its own"])
def test_layers_unfrozen_later_are_told_of_once(how, recwarn):
    warnings.simplefilter("always")  # Python's own filter shows a warning once, too
    model = Mlp()
    (name, late), *_ = model.named_parameters()
    late.requires_grad_(False)
    others = [p for p in model.parameters() if p is not late]
    optimizer = torch.optim.SGD(others if how == "a group of its own" else model.parameters(), lr=0.01)
    handle = SmoothOut(model, 0.1).attach(optimizer)
    plain_loop(model, optimizer, batches(3))
    assert not [w for w in recwarn if "take no noise" in str(w.message)]
    late.requires_grad_(True)
    if how == "a group of its own":
        optimizer.add_param_group({"params": [late]})
    plain_loop(model, optimizer, batches(8))
    (told,) = [str(w.message) for w in recwarn if "take no noise" in str(w.message)]
    assert told.startswith(f"{name}, frozen when SmoothOut was made, train now")
    handle.remove()
    SmoothOut(model, 0.1).attach(optimizer)
    plain_loop(model, optimizer, batches(8))
    assert len([w for w in recwarn if "take no noise" in str(w.message)]) == 1


def test_layers_that_select_leaves_out_or_that_are_gone_may_be_unfrozen(recwarn):
    model = Mlp()
    model.scale, model.shift = (nn.Parameter(torch.ones(1), requires_grad=False) for _ in range(2))
    model.phase = nn.Parameter(torch.ones(1, dtype=torch.complex64), requires_grad=False)
    optimizer = sgd(model)
    SmoothOut(model, 0.1, select=lambda name, parameter, module: name != "scale").attach(optimizer)
    model.scale.requires_grad_(True)
    model.phase.requires_grad_(True)  # which never takes any
    model.shift = None
    plain_loop(model, optimizer, batches(4))
    assert not recwarn.list
