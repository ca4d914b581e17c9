import copy

import pytest
import torch
from torch import nn

from cases import assert_same, snapshot
from smoothout import SmoothOut, frozen_statistics, update_bn


def network(momentum=0.1):
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=momentum), nn.ReLU(), nn.Linear(6, 2))


def test_noisy_forwards_update_the_statistics_unless_they_are_frozen():
    model = network()
    x = torch.randn(32, 4)
    smooth = SmoothOut(model, 0.3)
    before = snapshot(model)
    with smooth.perturbed(), frozen_statistics(model):
        frozen_output = model(x)
        frozen_output.sum().backward()
    assert_same(model, before, buffers=True)
    again = SmoothOut(model, 0.3)
    with again.perturbed():
        noisy_mean = model[0](x).mean(0)
        assert torch.equal(model(x), frozen_output)  # the same batch normalisation, but the statistics move
    torch.testing.assert_close(model[1].running_mean, 0.1 * noisy_mean)
    assert model[1].num_batches_tracked == 1


def test_frozen_statistics_come_back_after_an_exception():
    model = network()
    with pytest.raises(ZeroDivisionError), frozen_statistics(model):
        raise ZeroDivisionError
    assert model[1].track_running_stats


def test_layers_that_track_nothing_go_on_so():
    model = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.InstanceNorm1d(4))
    with frozen_statistics(model):
        model(torch.randn(8, 4, 2))
    assert not any(layer.track_running_stats for layer in model)


def test_update_bn_is_the_mean_over_batches_at_the_clean_weights():
    model = network(momentum=0.3)
    model[3].eval()
    modes = [m.training for m in model.modules()]
    model[1].running_mean.fill_(9.0)
    batches = [{"image": torch.randn(8, 4)} for _ in range(5)]
    weights = copy.deepcopy(list(model.parameters()))
    update_bn(model, batches, forward=lambda model, batch: model(batch["image"]))
    hidden = [model[0](b["image"]).detach() for b in batches]
    torch.testing.assert_close(model[1].running_mean, torch.stack([h.mean(0) for h in hidden]).mean(0))
    torch.testing.assert_close(model[1].running_var, torch.stack([h.var(0) for h in hidden]).mean(0))
    assert model[1].momentum == 0.3
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))


def test_update_bn_takes_tensors_and_pairs_by_default_and_needs_no_batchnorm():
    model = network()
    twin = copy.deepcopy(model)
    data = [torch.randn(8, 4) for _ in range(3)]
    update_bn(model, data)
    update_bn(twin, [(x, None) for x in data])
    assert torch.equal(model[1].running_var, twin[1].running_var)
    update_bn(nn.Linear(2, 2), iter([]))


def test_update_bn_of_a_model_without_parameters():
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False))
    x = torch.randn(8, 4)
    update_bn(model, [x])
    torch.testing.assert_close(model[0].running_mean, x.mean(0))


def test_without_a_batch_and_after_an_error_the_statistics_stay():
    norm = nn.BatchNorm1d(4)
    norm(torch.randn(8, 4) + 3)
    before = snapshot(norm)
    gone = iter([torch.randn(8, 4)])
    next(gone)
    with pytest.raises(ValueError, match="batches is empty"):
        update_bn(norm, gone)
    assert_same(norm, before)
    with pytest.raises(TypeError):
        update_bn(norm, [torch.randn(8, 4), 3])
    assert_same(norm, before)


def test_statistics_that_nothing_is_measured_of_stay():
    class KeepsItsBodyInEvalMode(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.unused = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)

        def train(self, mode=True):
            super().train(mode)
            self.body.eval()
            return self

        def forward(self, x):
            return self.head(self.body(x))

    model = KeepsItsBodyInEvalMode().train()
    for layer in (model.body, model.unused):
        layer.running_mean.fill_(3.0)
        layer.running_var.fill_(5.0)
    before = snapshot(model.body), snapshot(model.unused)
    x = torch.randn(8, 4)
    update_bn(model, [x])
    assert_same(model.body, before[0], buffers=True)
    assert_same(model.unused, before[1], buffers=True)
    assert model.body.momentum == model.unused.momentum == 0.1
    torch.testing.assert_close(model.head.running_mean, model.body(x).mean(0))


def test_instance_norm_that_tracks_is_frozen_too():
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.InstanceNorm1d(3, track_running_stats=True, momentum=0.3))
    before = snapshot(model)
    with frozen_statistics(model):
        model(torch.randn(4, 2, 5))
        model(torch.full((4, 2, 5), torch.inf))
    assert_same(model, before, buffers=True)
    model(torch.randn(4, 2, 5))
    assert not torch.equal(model[1].running_mean, torch.zeros(3))


def test_a_layer_that_writes_its_mean_without_counting_batches_is_measured():
    class Uncounted(nn.BatchNorm1d):
        def forward(self, x):
            self.running_mean.lerp_(x.detach().mean(0), 0.5)
            return x - self.running_mean

    layer, x = Uncounted(4), torch.randn(8, 4)
    layer.running_mean.fill_(3.0)
    update_bn(layer, [x])
    torch.testing.assert_close(layer.running_mean, 0.5 * x.mean(0))


def test_update_bn_called_as_torchs_own_says_which_comes_first():
    model, batches = network(), [torch.randn(8, 4)]
    before = snapshot(model)
    with pytest.raises(TypeError, match=r"model is a list: give the torch\.nn\.Module first, then the batches"):
        update_bn(batches, model)
    assert_same(model, before, buffers=True)
    with pytest.raises(TypeError, match=r"model is a str: give the torch\.nn\.Module first$"):
        update_bn("model", batches)


def test_update_bn_of_batches_that_are_dictionaries_asks_how():
    model = network()
    before = snapshot(model)
    with pytest.raises(ValueError, match="a batch is a dict: say how the model is called"):
        update_bn(model, [{"image": torch.randn(8, 4)}])
    assert_same(model, before, buffers=True)
    update_bn(model, [{"image": torch.randn(8, 4)}], forward=lambda model, batch: model(batch["image"]))
