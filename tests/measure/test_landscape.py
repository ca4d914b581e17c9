import json

import numpy as np
import pytest
import torch
from networks import Function, accuracy, batches, cross_entropy, mlp, trained, value_of
from torch import nn

from smoothout import measure
from smoothout.filters import filter_layout, filter_norms
from smoothout.measure import Landscape
from smoothout.measure._landscape import filter_directions, symmetric_grid
from smoothout.measure.loss_at import model_loss_at
from smoothout.select import everything, not_normalisation


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5)
        self.up, self.head = nn.ConvTranspose2d(5, 4, 2, groups=1), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.up(self.norm(self.conv(x)).relu()).mean((2, 3)))


def test_directions_have_the_norm_of_every_filter():
    model = Convolutions()
    with model_loss_at(model, cross_entropy, [0], select=everything) as at:
        first, second = filter_directions(at, 2, seed=0)
    position = 0
    for selected in at.selected:
        p = selected.parameter
        layout = filter_layout(selected.layer, selected.layer_slot, p)
        for direction in (first, second):
            part = direction[position : position + p.numel()].view(p.shape).float()
            torch.testing.assert_close(filter_norms(part, layout), filter_norms(p, layout), rtol=1e-5, atol=1e-7)
        position += p.numel()
    assert abs(torch.nn.functional.cosine_similarity(first, second, dim=0)) < 0.5


@pytest.mark.parametrize("dims", [1, 2])
def test_the_centre_is_the_base_loss(dims):
    data = batches()
    model = trained(mlp(), data).eval()
    found = measure.landscape(model, cross_entropy, data, dims=dims, steps=5, accuracy_fn=accuracy)
    centre = found.losses[2] if dims == 1 else found.losses[2][2]
    right = found.accuracies[2] if dims == 1 else found.accuracies[2][2]
    direct = measure.sensitivity(model, cross_entropy, data, [0.0], accuracy_fn=accuracy)
    assert centre == found.base_loss == direct.losses[0]
    assert right == direct.accuracies[0]
    assert found.coordinates == (-1.0, -0.5, 0.0, 0.5, 1.0)
    assert found.dims == dims
    assert found.curves == ((found.losses,) if dims == 1 else ())


def test_a_bowl_along_its_directions():
    """‖d‖ = ‖w‖ for a matrix of one filter: ‖w + x·d‖² = ‖w‖²·(1 + x²) + 2x·w·d exactly."""
    model = nn.Linear(30, 1, bias=False, dtype=torch.float64)
    w = model.weight.detach()
    loss = lambda m, b: (m.weight**2).sum()  # noqa: E731
    found = measure.landscape(model, loss, [0], span=0.7, steps=9, directions=3)
    x, square = np.array(found.coordinates), (w**2).sum().item()
    for curve in found.curves:
        along = np.array(curve) - square * (1 + x**2)
        assert along == pytest.approx(x * along[-1] / x[-1], abs=1e-6 * square)
    assert np.mean(found.curves, axis=0) == pytest.approx(found.losses)
    assert len(set(found.curves)) == 3
    assert found.losses[4] == found.base_loss  # the mean over directions, too


def test_axes_of_the_grid():
    """losses[i][j] is at coordinates[i] along the first direction and coordinates[j] along the second."""
    data = batches()
    model = trained(mlp(), data)
    grid = measure.landscape(model, cross_entropy, data, dims=2, steps=3, seed=4)
    lines = measure.landscape(model, cross_entropy, data, steps=3, directions=2, seed=4)
    assert [row[1] for row in grid.losses] == pytest.approx(lines.curves[0], rel=1e-12)
    assert grid.losses[1] == pytest.approx(lines.curves[1], rel=1e-12)


def test_normalisation_layers_are_left_out_by_default():
    model = mlp()
    seen = []

    def record(model, batch):
        seen.append((model[0].weight.tolist(), model[0].bias.tolist(), model[1].weight.tolist()))
        return cross_entropy(model, batch)

    def moved(**options):
        seen.clear()
        measure.landscape(model, record, batches(1), steps=2, **options)
        return [now != before for now, before in zip(seen[-1], seen[0])]

    assert moved() == [True, True, False]
    assert moved(select=not_normalisation) == [True, True, False]
    assert moved(select=everything) == [True, True, True]
    assert moved(select=lambda name, parameter, module: parameter.ndim > 1) == [True, False, False]


@pytest.mark.parametrize("steps", [2, 3, 50, 51])
def test_the_grid_is_symmetric(steps):
    grid = symmetric_grid(0.3, steps)
    assert len(grid) == steps
    assert (grid[0], grid[-1]) == (-0.3, 0.3)
    assert [-x for x in reversed(grid)] == list(grid)
    assert (0.0 in grid) == (steps % 2 == 1)


def test_progress_and_json():
    told = []
    model = Function(lambda w: (w**2).sum(), torch.ones(3))
    for options, points in (({"dims": 2, "steps": 3}, 9), ({"steps": 4, "directions": 2}, 8)):
        told.clear()
        found = measure.landscape(model, value_of, [0], progress=lambda *p: told.append(p), **options)
        assert told == [(i + 1, points) for i in range(points)]
        assert Landscape.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dims": 3}, "dims=3"),
        ({"span": 0}, "span=0"),
        ({"steps": 1}, "steps=1"),
        ({"directions": 0}, "directions=0"),
        ({"directions": 2, "dims": 2}, "directions=2 with dims=2"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        measure.landscape(mlp(), cross_entropy, batches(), **options)


def test_numbers_of_numpy():
    model = Function(lambda w: (w**2).sum(), torch.ones(3))
    for whole in ({"dims": 2, "steps": 3}, {"dims": 1, "steps": 4, "directions": 2}):
        of_numpy = {name: np.int64(value) for name, value in whole.items()}
        found = measure.landscape(model, value_of, [0], span=np.float32(0.5), **of_numpy)
        assert found == measure.landscape(model, value_of, [0], span=0.5, **whole)
