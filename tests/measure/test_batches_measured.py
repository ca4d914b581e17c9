"""Batches that are other ones in each pass, or that loss_fn changes."""

import warnings

import numpy as np
import pytest
import torch
from networks import batches, cross_entropy, mlp
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from smoothout import measure

WHOLE = tuple(torch.cat(parts) for parts in zip(*batches()))
MEASUREMENTS = {
    "sharpness": lambda m, f, b: measure.sharpness(m, f, b, restarts=1, max_iterations=2),
    "sensitivity": lambda m, f, b: measure.sensitivity(m, f, b, [0.1]),
    "interpolate": lambda m, f, b: measure.interpolate(m, m.state_dict(), m.state_dict(), f, b, [0.5, 1.0]),
    "landscape": lambda m, f, b: measure.landscape(m, f, b, steps=2),
    "curvature": lambda m, f, b: measure.curvature(m, f, b, probes=2, max_iterations=2),
}


class OwnGenerator(Dataset):
    """Augments by a generator that goes on from pass to pass, as some libraries' transforms do."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return len(WHOLE[0])

    def __getitem__(self, i):
        return WHOLE[0][i] + float(self.rng.standard_normal()), WHOLE[1][i]


class Stream(IterableDataset):
    def __init__(self):
        self.position = 0

    def __iter__(self):
        for _ in range(10):
            self.position = (self.position + 1) % len(WHOLE[0])
            yield WHOLE[0][self.position], WHOLE[1][self.position]


@pytest.mark.parametrize("name", MEASUREMENTS)
@pytest.mark.parametrize("dataset", [OwnGenerator, Stream])
def test_other_data_in_each_pass_are_told_of(name, dataset):
    with pytest.warns(UserWarning, match="the first batch is another one") as told:
        MEASUREMENTS[name](mlp(), cross_entropy, DataLoader(dataset(), 5))
    assert len(told) == 1


@pytest.mark.parametrize("name", MEASUREMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_that_writes_to_its_batch_is_told_of(name, dtype):
    def writing(model, batch):
        batch[0][-1, -1] *= 0.9
        return cross_entropy(model, batch)

    with pytest.warns(UserWarning, match="does not write to them") as told:
        MEASUREMENTS[name](mlp().to(dtype), writing, [(x.to(dtype), y) for x, y in batches(1)])
    assert len(told) == 1


def test_other_data_are_not_taken_for_a_lost_graph():
    class WithUnused(nn.Module):
        def __init__(self):
            super().__init__()
            self.network, self.unused = mlp(), nn.Linear(2, 2)

        def forward(self, x):
            return self.network(x)

    with pytest.warns(UserWarning, match="the first batch is another one") as told:
        measure.sharpness(WithUnused(), cross_entropy, DataLoader(OwnGenerator(), 5), restarts=1, max_iterations=2)
    assert len(told) == 1


class ByEpoch(RandomSampler):
    """Shuffles by the number of the epoch, which it counts, as Accelerate's with `use_seedable_sampler`."""

    epoch = 0

    def __iter__(self):
        self.generator = torch.Generator().manual_seed(self.epoch)
        yield from super().__iter__()
        self.epoch += 1


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_a_sampler_that_counts_epochs_gives_the_same_order_and_training_goes_on_with_its_own(name):
    def loader():
        whole = TensorDataset(*WHOLE)
        return DataLoader(whole, batch_sampler=BatchSampler(ByEpoch(whole), 5, drop_last=True))

    def orders(loader, passes):
        return [[x.tolist() for x, _ in loader] for _ in range(passes)]

    measured, plain = loader(), loader()
    assert orders(measured, 1) == orders(plain, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MEASUREMENTS[name](mlp(), cross_entropy, measured)
    assert orders(measured, 2) == orders(plain, 2)


def converting(model, batch):
    batch["x"] = batch["x"].bfloat16()
    batch["mask"] = batch["x"] > 0
    return cross_entropy(model, (batch["x"].float().nan_to_num(), batch["y"]))


@pytest.mark.parametrize("name", MEASUREMENTS)
@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_the_same_data_are_not(name, workers):
    """In another order, in another dtype, with what loss_fn added, with a NaN that is masked."""
    held = [{"x": x.clone(), "y": y} for x, y in batches()]
    held[0]["x"][0, 0] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MEASUREMENTS[name](mlp(), cross_entropy, DataLoader(TensorDataset(*WHOLE), 5, shuffle=True, **workers))
        MEASUREMENTS[name](mlp(), converting, held)


@pytest.mark.filterwarnings("error:Casting complex")
@pytest.mark.filterwarnings("ignore")  # torch's own: quantised tensors are to go, nested ones a prototype
@pytest.mark.parametrize(
    ("made", "dense"),
    [
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), torch.Tensor.dequantize),
        (lambda x: x.to_sparse(), torch.Tensor.to_dense),
        (lambda x: torch.complex(x, x), torch.Tensor.abs),
        (lambda x: torch.nested.nested_tensor([x[:2], x[2:]]), lambda x: torch.cat(x.unbind())),
    ],
    ids=["quantised", "sparse", "complex", "nested"],
)
def test_batches_of_every_kind_of_tensor(made, dense):
    ((x, y),) = batches(1)
    held = [(made(x), y)]
    loss = lambda model, batch: cross_entropy(model, (dense(batch[0]), batch[1]))  # noqa: E731
    expected = measure.sensitivity(mlp(), cross_entropy, [(dense(held[0][0]), y)], [0.1])
    assert measure.sensitivity(mlp(), loss, held, [0.1]).losses == expected.losses


def test_batches_weigh_as_they_were_before_a_loss_that_pops():
    class Dictionaries:
        def __iter__(self):
            return ({"x": x, "y": y} for x, y in batches())

    def popping(model, batch):
        return cross_entropy(model, (batch.pop("x"), batch.pop("y")))

    model = mlp()
    for name in ("sharpness", "interpolate", "curvature"):
        expected = MEASUREMENTS[name](model, cross_entropy, batches())
        assert MEASUREMENTS[name](model, popping, Dictionaries()) == expected


def test_finite_batches_whose_sum_is_not_finite_are_told():
    data = [(torch.tensor(1e308, dtype=torch.float64),)] * 2
    with pytest.raises(ValueError, match="loss at the start is inf: though every batch alone gives a finite one"):
        measure.sensitivity(mlp(), lambda model, batch: batch[0], data, [0.1])
