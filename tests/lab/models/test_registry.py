"""The networks: their sizes, their shapes, their initialisation, and finding them by name."""

import copy
import math
import sys

import pytest
import torch
from torch import nn

from smoothout.lab.models import MODELS, build, default_model
from smoothout.lab.models.resnet import cifar_resnet

PARAMETERS = [
    ("f1", {}, 1_462_794),
    ("c1", {}, 1_388_490),
    ("c3", {}, 1_405_860),
    ("resnet44", {}, 661_338),
    ("resnet44", {"classes": 100}, 667_188),
    ("alexnet", {}, 61_110_184),
    ("resnet18", {}, 11_689_512),
    ("f1", {"input_shape": (1, 8, 8)}, 1_462_794 - (784 - 64) * 512),
]


@pytest.mark.parametrize(("name", "arguments", "count"), PARAMETERS)
def test_parameter_counts(name, arguments, count):
    with torch.device("meta"):
        model = build(name, **arguments)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


SHAPES = {
    "mlp": (1, 8, 8),
    "f1": (1, 28, 28),
    "c1": (3, 32, 32),
    "c3": (3, 32, 32),
    "resnet44": (3, 32, 32),
    "resnet18": (3, 64, 64),
    "alexnet": (3, 63, 63),
}


@pytest.mark.parametrize("name", SHAPES)
def test_forward_and_backward(name):
    model = build(name, classes=7, input_shape=SHAPES[name])
    logits = model(torch.randn(3, *SHAPES[name]))
    assert logits.shape == (3, 7)
    nn.functional.cross_entropy(logits, torch.tensor([0, 3, 6])).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "side"), [("alexnet", 224), ("resnet18", 224), ("c1", 32)])
def test_the_papers_image_sizes_fit(name, side):
    with torch.device("meta"):
        assert build(name, classes=5)(torch.empty(2, 3, side, side)).shape == (2, 5)


@pytest.mark.parametrize("name", ["resnet44", "resnet18"])
def test_convolutions_start_as_stated(name):
    torch.manual_seed(0)
    for module in build(name).modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 5000:
            expected = math.sqrt(2 / (module.kernel_size[0] ** 2 * module.out_channels))
            # The standard error of a standard deviation over n values is σ/√(2n).
            assert abs(module.weight.std() - expected) < 5 * expected / math.sqrt(2 * module.weight.numel())
            assert abs(module.weight.mean()) < 5 * expected / math.sqrt(module.weight.numel())


def test_dropout_of_c1_is_on_in_training_only():
    model, x = build("c1"), torch.randn(4, 3, 32, 32)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.5, 0.5]
    assert not [module for module in build("c1", dropout=0.0).modules() if isinstance(module, nn.Dropout) and module.p]


@pytest.mark.parametrize(
    ("dataset", "model"),
    [("digits", "f1"), ("mnist", "f1"), ("cifar10", "c1"), ("cifar100", "c3"), ("imagefolder:x", "resnet18")],
)
def test_each_dataset_has_a_default(dataset, model):
    assert default_model(dataset) == model
    assert model in MODELS


def test_a_users_function(tmp_path, monkeypatch):
    (tmp_path / "my_networks_of_a_test.py").write_text(
        "from functools import wraps\nfrom torch import nn\n"
        "def tiny(classes, width=4):\n    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, classes))\n"
        "def anything(**given):\n    return nn.Linear(given['input_shape'][0], given['classes'])\n"
        "def nothing():\n    return 3\n"
        "def sized(function):\n    return wraps(function)(lambda **given: function(width=4, **given))\n"
        "@sized\ndef decorated(classes, width):\n    return nn.Linear(width, classes)\n"
    )
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    assert build("my_networks_of_a_test:tiny", classes=3, input_shape=(1, 2, 2), width=5)[0].out_features == 5
    assert build("my_networks_of_a_test:anything", classes=3, input_shape=(6, 2, 2)).weight.shape == (3, 6)
    assert build("my_networks_of_a_test:decorated", classes=3).weight.shape == (3, 4)
    assert sys.path == path
    with pytest.raises(ValueError, match="returned a int"):
        build("my_networks_of_a_test:nothing", classes=3)
    with pytest.raises(ValueError, match="missing a required argument: 'classes'; it can be given input_shape, width"):
        build("my_networks_of_a_test:tiny", input_shape=(1, 2, 2), width=5)
    with pytest.raises(ValueError, match="no function 'absent'"):
        build("my_networks_of_a_test:absent")
    with pytest.raises(ValueError, match="no module 'no_such_module'"):
        build("no_such_module:f")


def test_wrong_names_and_depths():
    with pytest.raises(ValueError, match=r"model='resnet43' is not known: did you mean 'resnet32' or 'resnet44'\?"):
        build("resnet43")
    with pytest.raises(ValueError, match=r"model='transformer' is not known: choose one of mlp, .*, module:function"):
        build("transformer")
    with pytest.raises(ValueError, match="6n"):
        cifar_resnet(43)
    with pytest.raises(ValueError, match="63"):
        build("alexnet", input_shape=(3, 32, 32))


def test_convolutions_of_c1_are_their_layers_one_after_another():
    features = build("c1").features
    twin, x = nn.Sequential(*copy.deepcopy(list(features))), torch.randn(4, 3, 32, 32)
    assert torch.equal(features(x), twin(x))
    assert all(map(torch.equal, features.buffers(), twin.buffers()))
    seen = []
    features[3].register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(features(x), twin(x))
    assert seen
