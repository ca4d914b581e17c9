"""A finished run, loaded to be measured."""

import pytest
import torch

from smoothout import measure
from smoothout.lab.config import resolve
from smoothout.lab.train.start import Options, train
from smoothout.lab.trained import OnePass, load_trained, mean_loss

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module", params=["plain", "smoothout"])
def c1(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("c1") / request.param
    train(
        resolve(model="c1", method=request.param, batch_size=128, epochs=4), folder, Options(device="cpu", quiet=True)
    )
    return folder


def test_both_solvers_agree_within_one_per_cent_on_c1(c1):
    trained = load_trained(c1, device="cpu", images=200)
    ascent, solver = (
        measure.sharpness(
            trained.model, mean_loss, trained.batches("train"), restarts=2, max_iterations=10, method=method
        )
        for method in ("ascent", "lbfgsb")
    )
    assert ascent.value > 1
    assert ascent.value == pytest.approx(solver.value, rel=0.01)


def test_images_are_the_first_of_each_split(c1):
    some, every = (load_trained(c1, device="cpu", images=images) for images in (50, None))
    assert len(some.train.split) == len(some.test.split) == 50
    assert torch.equal(some.train.split.images, every.train.split.images[:50])
    assert some.held("train") is some.train  # a CPU does not keep batches


def test_accuracy_comes_from_the_pass_of_the_loss_at_the_same_weights(c1):
    """As two passes give it, at weights that differ from call to call."""
    trained = load_trained(c1, device="cpu", images=100)
    passes = []
    trained.model.register_forward_pre_hook(lambda *_: passes.append(1))

    def by_its_own_pass(model, batch):
        return (model(batch[0]).argmax(1) == batch[1]).double().mean()

    def curve(loss, accuracy):
        return measure.sensitivity(
            trained.model, loss, trained.batches("train"), [0.0, 0.3, 1.0], draws=2, accuracy_fn=accuracy
        )

    expected, twice = curve(mean_loss, by_its_own_pass), len(passes)
    one_pass = OnePass()
    assert curve(one_pass.loss, one_pass.accuracy) == expected
    base, asked = 1, 6  # the loss at the start; three strengths, two draws
    assert (twice, len(passes) - twice) == (base + 2 * asked, base + asked)


def test_an_accuracy_without_its_loss_has_a_pass_of_its_own(c1):
    trained = load_trained(c1, device="cpu", images=100)
    (batch,), one_pass = list(trained.batches("train")), OnePass()
    one_pass.loss(trained.model, batch)
    first = one_pass.accuracy(trained.model, batch)
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.zero_()
    assert one_pass.accuracy(trained.model, batch) != first


@pytest.mark.gpu
@needs_cuda
def test_on_cuda_kept_batches_give_what_the_loader_gives(c1):
    trained, small = load_trained(c1, device="cuda"), load_trained(c1, device="cuda", batch_size=100)
    assert isinstance(trained.held("train"), list)
    kept = measure.sensitivity(trained.model, mean_loss, trained.held("train"), [0.0, 0.05], draws=2)
    made = measure.sensitivity(small.model, mean_loss, small.batches("train"), [0.0, 0.05], draws=2)
    assert kept.losses == pytest.approx(made.losses, rel=1e-5)
