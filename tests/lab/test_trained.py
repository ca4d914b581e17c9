"""A finished run, loaded to be measured."""

import pytest
import torch

from smoothout import measure
from smoothout.lab.config import resolve
from smoothout.lab.train.start import Options, train
from smoothout.lab.trained import load_trained, mean_loss

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


@pytest.mark.gpu
@needs_cuda
def test_on_cuda_kept_batches_give_what_the_loader_gives(c1):
    trained, small = load_trained(c1, device="cuda"), load_trained(c1, device="cuda", batch_size=100)
    assert isinstance(trained.held("train"), list)
    kept = measure.sensitivity(trained.model, mean_loss, trained.held("train"), [0.0, 0.05], draws=2)
    made = measure.sensitivity(small.model, mean_loss, small.batches("train"), [0.0, 0.05], draws=2)
    assert kept.losses == pytest.approx(made.losses, rel=1e-5)
