import collections
import math
import warnings

import numpy as np
import pytest
import torch
from networks import MEASUREMENTS, Function, accuracy, batches, cross_entropy, everything_about, mlp, value_of
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from smoothout import SmoothOut, measure
from smoothout.measure.loss_at import FunctionLossAt, model_loss_at, weight_of


def in_use():
    """A model in the midst of training: gradients, mixed modes, dropout, and a shuffling loader."""
    model = mlp(dropout=0.5)
    model[1].eval()
    data = batches()
    cross_entropy(model, data[0]).backward()
    whole = TensorDataset(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))
    return model, DataLoader(whole, batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("train_mode", [False, True])
@pytest.mark.parametrize("name", MEASUREMENTS)
def test_a_measurement_leaves_everything_as_it_was(name, train_mode):
    model, loader = in_use()
    before = everything_about(model, loader)
    MEASUREMENTS[name](model, cross_entropy, loader, train_mode=train_mode)
    assert everything_about(model, loader) == before


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("call", [1, 5, 14])
@pytest.mark.parametrize("name", MEASUREMENTS)
def test_an_interrupted_measurement_does_too(name, call, interruption):
    model, loader = in_use()
    before = everything_about(model, loader)
    calls = 0

    def fails(model, batch):
        nonlocal calls
        calls += 1
        if calls == call:
            raise interruption
        return cross_entropy(model, batch)

    try:
        MEASUREMENTS[name](model, fails, loader, train_mode=True)
    except interruption:
        assert calls == call
    else:
        assert calls < call
    assert everything_about(model, loader) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", MEASUREMENTS)
def test_the_generators_of_the_gpu_are_left_alone(name):
    model, loader = in_use()
    model.cuda()
    torch.rand(3, device="cuda")
    before = everything_about(model, loader), torch.cuda.get_rng_state().tolist()
    MEASUREMENTS[name](model, lambda m, b: cross_entropy(m, (b[0].cuda(), b[1].cuda())), loader, train_mode=True)
    assert (everything_about(model, loader), torch.cuda.get_rng_state().tolist()) == before


def test_a_measurement_between_forward_and_backward_changes_no_gradient():
    model, data = mlp().train(), batches()
    expected = torch.autograd.grad(cross_entropy(model, data[0]), list(model.parameters()))
    loss = cross_entropy(model, data[0])
    measure.sharpness(model, cross_entropy, data, restarts=1)
    for found, right in zip(torch.autograd.grad(loss, list(model.parameters())), expected):
        torch.testing.assert_close(found, right, rtol=0, atol=0)


def test_measuring_inside_perturbed_measures_the_noisy_weights():
    model, data = mlp().eval(), batches()
    smooth = SmoothOut(model, 0.3)
    with smooth.perturbed():
        direct = np.average([cross_entropy(model, b).item() for b in data], weights=[len(b[1]) for b in data])
        measured = measure.sensitivity(model, cross_entropy, data, [0.0]).losses[0]
    assert measured == pytest.approx(direct, rel=1e-12)


def test_batches_weigh_by_their_length():
    model, data = mlp().eval(), batches()
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    with model_loss_at(model, cross_entropy, data) as many, torch.no_grad():
        assert many.loss(many.start) == pytest.approx(cross_entropy(model, (x, y)).item(), rel=1e-6)
    assert weight_of({"image": x, "label": y}) == len(x)
    assert weight_of(collections.UserDict({"image": x, "label": y})) == len(x)  # as Transformers' BatchEncoding
    assert weight_of((3, [torch.zeros(2), x])) == 2
    assert weight_of((torch.tensor(1.0), x)) == weight_of("none") == 1


def test_loss_gradient_and_second_derivative_agree_with_the_dense_ones():
    model, data = mlp().double().eval(), [(x.double(), y) for x, y in batches()]
    shapes = {n: p.shape for n, p in model.named_parameters()}
    whole = (torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))

    def dense(w):
        parts = w.split([s.numel() for s in shapes.values()])
        state = {n: part.view(s) for part, (n, s) in zip(parts, shapes.items())}
        return torch.nn.functional.cross_entropy(torch.func.functional_call(model, state, (whole[0],)), whole[1])

    with model_loss_at(model, cross_entropy, data) as at, torch.no_grad():
        w = at.start + 0.1 * torch.randn_like(at.start)
        v = torch.randn_like(w)
        loss, gradient = at.loss_and_gradient(w)
        product = at.hessian_vector_product(at.start, v)
    assert loss == pytest.approx(dense(w).item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.func.grad(dense)(w))
    torch.testing.assert_close(product, torch.func.hessian(dense)(at.start) @ v)
    explicit = FunctionLossAt(dense, w)
    torch.testing.assert_close(explicit.loss_and_gradient(w)[1], gradient)
    torch.testing.assert_close(explicit.hessian_vector_product(at.start, v), product)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_vector_is_rounded_once(dtype):
    model = Function(lambda w: w.float().sum(), torch.tensor([1.0, -3.0]), dtype=dtype)
    with model_loss_at(model, value_of, [0]) as at:
        w = at.start + 2.0**-20
        at.write(w)
        assert torch.equal(model.w, w.to(dtype))
        assert at.start.dtype == torch.float64


def test_dropout_masks_and_shuffles_are_the_same_in_every_evaluation():
    model, loader = in_use()
    with model_loss_at(model, cross_entropy, loader, train_mode=True) as at:
        assert at.loss(at.start) == at.loss(at.start) == at.loss_and_gradient(at.start)[0]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(x[0], y[0]) for x, y in batches()])


def test_a_loader_of_unknown_length():
    model, rows = mlp(), [(x[:1], y[:1]) for x, y in batches()]
    found = measure.sensitivity(model, cross_entropy, DataLoader(Stream(), batch_size=1), [0.0])
    assert found.losses == measure.sensitivity(model, cross_entropy, rows, [0.0]).losses


def test_in_training_mode_every_evaluation_starts_from_the_same_buffers():
    torch.manual_seed(0)
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
    first.parametrizations.weight[0]._v.copy_(torch.eye(6)[0])  # which each pass in training mode moves
    model, data = nn.Sequential(first, nn.Tanh(), nn.Linear(8, 4)), batches()
    with model_loss_at(model, cross_entropy, data, train_mode=True) as at:
        assert at.loss(at.start) == at.loss(at.start) == at.loss_and_gradient(at.start)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.layer(x[:, None])[0][:, -1])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_recurrent_layers_are_differentiated_in_eval_mode_without_cudnn(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    used = set()

    def loss(model, batch):
        used.add((torch.is_grad_enabled(), torch.backends.cudnn.enabled))
        return cross_entropy(model, batch)

    model, data = Recurrent().to(device), [(x.to(device), y.to(device)) for x, y in batches()]
    measure.sharpness(model, loss, data, restarts=1)
    measure.curvature(model, loss, data, probes=2)
    assert used == {(False, True), (True, False)}
    assert torch.backends.cudnn.enabled


def test_a_parameter_that_the_loss_does_not_use_has_gradient_zero():
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    with model_loss_at(model, lambda m, b: m["used"](b).square().mean(), [torch.ones(3, 2)]) as at:
        _, gradient = at.loss_and_gradient(at.start)
        assert gradient[:3].all()
        assert not gradient[3:].any()
        assert not at.hessian_vector_product(at.start, torch.ones_like(at.start))[3:].any()


@pytest.mark.parametrize("name", [n for n in MEASUREMENTS if "sharpness" in n or n == "curvature"])
def test_a_loss_without_a_graph_does_not_pass_for_flat(name):
    with pytest.raises(ValueError, match=r"without a graph, as under torch.no_grad\(\)"):
        MEASUREMENTS[name](mlp(), torch.no_grad()(cross_entropy), batches())


class Detached(nn.Module):
    """A head on features that no gradient comes to, and a layer that is not used."""

    def __init__(self):
        super().__init__()
        self.features, self.head, self.unused = nn.Linear(6, 12), nn.Linear(12, 4), nn.Linear(2, 2)

    def forward(self, x):
        with torch.no_grad():
            h = self.features(x).tanh()
        return self.head(h)


@pytest.mark.parametrize("name", [n for n in MEASUREMENTS if "sharpness" in n or n == "curvature"])
def test_weights_that_no_gradient_comes_to_are_told_of(name):
    model = Detached()
    with pytest.warns(
        UserWarning, match=r"no gradient comes to features.weight, features.bias, unused.weight and 1 more"
    ) as told:
        MEASUREMENTS[name](model, cross_entropy, batches())
    assert len(told) == 1
    model.features.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MEASUREMENTS[name](model, cross_entropy, batches())


def test_where_the_loss_is_nan_nothing_is_told_of_its_graph():
    with model_loss_at(Detached(), cross_entropy, batches()) as at:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            at.loss_and_gradient(at.start * math.nan)
        with pytest.warns(UserWarning, match="no gradient comes to"):
            at.loss_and_gradient(at.start)


@pytest.mark.parametrize("name", [n for n in MEASUREMENTS if "sharpness" in n or n == "curvature"])
def test_parameters_on_one_another_are_told_of(name):
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.Linear(6, 4))
    model[2].weight.data = model[0].weight.data
    with pytest.warns(UserWarning, match="measured parameters share memory"):
        MEASUREMENTS[name](model, cross_entropy, batches())
    model[2].weight = model[0].weight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MEASUREMENTS[name](model, cross_entropy, batches())
        columns = torch.randn(6, 12)  # of one matrix lie between one another and share nothing
        model[0].weight, model[2].weight = nn.Parameter(columns[:, :6]), nn.Parameter(columns[:, 6:])
        MEASUREMENTS[name](model, cross_entropy, batches())


def test_sparse_gradients_of_an_embedding():
    data = [(torch.tensor([[0, 1], [4, 1]]), torch.tensor([2, 0]))]

    def measured(sparse):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Flatten(), nn.Linear(6, 3))
        return measure.sharpness(model, cross_entropy, data), measure.curvature(model, cross_entropy, data)

    assert measured(sparse=True) == measured(sparse=False)


class Exhausted:
    """Not an iterator, but gives its batches only once."""

    def __init__(self, batches):
        self.once = iter(batches)

    def __iter__(self):
        return self.once


@pytest.mark.parametrize("name", MEASUREMENTS)
@pytest.mark.parametrize(
    ("batches_given", "words"),
    [
        (lambda: iter(batches()), "iterator.*exhausted"),
        (lambda: (b for b in batches()), "generator.*exhausted"),
        (lambda: Exhausted(batches()), "exhausted"),
        (list, "batches is empty"),
        (lambda: Exhausted([]), "batches is empty"),
    ],
)
def test_batches_that_cannot_be_gone_through_again_are_refused(name, batches_given, words):
    with pytest.raises(ValueError, match=words):
        MEASUREMENTS[name](mlp(), cross_entropy, batches_given())


@pytest.mark.parametrize("name", [n for n in MEASUREMENTS if n not in ("interpolate", "recomputed")])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_at_the_start_names_the_batch(name, bad):
    data = [(x, y, torch.tensor(bad if i == 1 else 0.0)) for i, (x, y) in enumerate(batches())]
    model = mlp()
    before = everything_about(model)
    with pytest.raises(ValueError, match=rf"loss at the start is {bad}: batch 1 gives {bad}"):
        MEASUREMENTS[name](model, lambda m, b: cross_entropy(m, b) + b[2], data)
    assert everything_about(model) == before


@pytest.mark.parametrize("name", MEASUREMENTS)
@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [(lambda m, b: m(b[0]), r"shape \(8, 4\)"), (lambda m, b: 0.5, "a float"), (lambda m, b: None, "NoneType")],
)
def test_a_loss_that_is_no_scalar_is_refused(name, loss_fn, words):
    with pytest.raises(ValueError, match=rf"loss_fn\(model, batch\) returned .*{words}"):
        MEASUREMENTS[name](mlp(), loss_fn, batches())


def test_one_batch_instead_of_a_list_of_them_is_told_beside_the_error():
    (batch, *_) = batches()
    with pytest.raises(Exception) as raised:
        measure.sharpness(mlp(), cross_entropy, batch)
    assert any("give [batch]" in note for note in raised.value.__notes__)
    assert measure.sharpness(mlp(), cross_entropy, [batch]).value > 0
    with pytest.raises(ZeroDivisionError) as raised:
        measure.sharpness(mlp(), lambda model, batch: 1 / 0, [batch])
    assert not hasattr(raised.value, "__notes__")


def test_other_bad_input():
    frozen = mlp().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to measure"):
        measure.sharpness(frozen, cross_entropy, batches())
    with pytest.raises(TypeError, match="model is a str"):
        measure.sharpness("model", cross_entropy, batches())
    with pytest.raises(TypeError, match="loss_fn=3"):
        measure.sharpness(mlp(), 3, batches())
    for criterion in (nn.CrossEntropyLoss(), nn.functional.cross_entropy):
        with pytest.raises(TypeError, match=r"loss_fn is torch's .*: give a function of \(model, batch\)"):
            measure.sharpness(mlp(), criterion, batches())
    with pytest.raises(TypeError, match="accuracy_fn=3"):
        measure.sensitivity(mlp(), cross_entropy, batches(), [0.1], accuracy_fn=3)
    with pytest.raises(TypeError, match="batches is a int"):
        measure.sharpness(mlp(), cross_entropy, 3)
    with pytest.raises(TypeError, match=r"batches is a dict, one batch\? Give a list of batches"):
        measure.sharpness(mlp(), cross_entropy, {"image": torch.zeros(2, 6)})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_explicit_function_has_derivatives_there_too(mode):
    with mode():
        bowl = FunctionLossAt(lambda w: (w**2).sum(), torch.ones(2))
        assert bowl.loss(bowl.start) == bowl.loss_and_gradient(bowl.start)[0] == 2.0
        assert bowl.loss_and_gradient(bowl.start)[1].tolist() == [2.0, 2.0]
        assert bowl.hessian_vector_product(bowl.start, bowl.start).tolist() == [2.0, 2.0]


def test_an_attached_model_is_measured_without_noise_in_training_mode_too():
    model, data = mlp(), batches()
    free = measure.sharpness(model, cross_entropy, data, train_mode=True, restarts=1, max_iterations=1).base_loss
    SmoothOut(model, 0.5).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    attached = measure.sharpness(model, cross_entropy, data, train_mode=True, restarts=1, max_iterations=1).base_loss
    assert attached == free
    measure.curvature(model, cross_entropy, data, train_mode=True, max_iterations=2)


def test_an_attached_model_whose_backward_is_still_to_come_is_not_measured():
    model, data = mlp(), batches()
    handle = SmoothOut(model, 0.5).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    cross_entropy(model.train(), data[0])
    with pytest.raises(RuntimeError, match="waits for its backward"):
        measure.sensitivity(model, cross_entropy, data, [0.0, 0.1])
    handle.restore()
    measure.sensitivity(model, cross_entropy, data, [0.0, 0.1])


def test_a_removed_handle_does_not_count_as_a_forward_that_waits():
    model, data = mlp(), batches()
    smooth = SmoothOut(model, 0.5)
    handle = smooth.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    handle.remove()
    with smooth.perturbed():
        noisy = measure.sensitivity(model, cross_entropy, data, [0.0]).losses
    assert handle.removed
    assert noisy != measure.sensitivity(model, cross_entropy, data, [0.0]).losses


@pytest.mark.parametrize("fraction", [0.0, 0.1, 1.0])
def test_an_accuracy_is_what_accuracy_fn_returned(fraction):
    data = [(torch.zeros(3, 6), torch.zeros(3, dtype=torch.long))]
    found = measure.sensitivity(mlp(), cross_entropy, data, [0.0], accuracy_fn=lambda model, batch: fraction)
    assert found.accuracies == (fraction,)  # not what single precision makes of it, nor 0.1 · 3 / 3


@pytest.mark.parametrize(
    ("accuracy_fn", "words"),
    [
        (lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).sum() + 2, "neither a count nor per cent"),
        (lambda model, batch: -0.1, "returned -0.1 on average"),
        (lambda model, batch: model(batch[0]).argmax(1) == batch[1], r"of shape \(\d+,\): give the fraction right"),
    ],
)
def test_an_accuracy_that_is_no_fraction_is_refused(accuracy_fn, words):
    with pytest.raises(ValueError, match=words):
        measure.sensitivity(mlp(), cross_entropy, batches(), [0.0], accuracy_fn=accuracy_fn)
    measure.sensitivity(mlp(), cross_entropy, batches(), [0.0], accuracy_fn=accuracy)
