"""Architecture as tests: what an import costs, and what the package shows."""

import subprocess
import sys

import pytest

import smoothout


@pytest.fixture(scope="module")
def modules():
    """Those that are there after each of these statements, in a process of its own."""
    statements = ("import torch", "import smoothout", "from smoothout import *", "import smoothout.lab.cli")
    code = "import sys; " + "".join(f"{statement}; print(*sys.modules); " for statement in statements)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return dict(zip(statements, (set(line.split()) for line in done.stdout.splitlines()), strict=True))


def test_importing_the_method_brings_in_torch_and_numpy_only(modules):
    loaded = {name.partition(".")[0] for name in modules["import smoothout"]}
    unwanted = {"scipy", "matplotlib", "lightning", "pytorch_lightning", "transformers", "accelerate", "typer", "rich"}
    assert "torch" in loaded
    assert not loaded & (unwanted | {"triton", "sklearn", "PIL", "jinja2", "safetensors", "tensorboard"})


def test_the_method_loads_nothing_of_the_lab_nor_of_distributed_sharding(modules):
    loaded = modules["from smoothout import *"] - modules["import torch"]
    assert not [name for name in loaded if name.startswith(("smoothout.lab", "smoothout.measure", "smoothout.integ"))]
    assert "torch.distributed.fsdp" not in loaded
    assert "torch.distributed.tensor" not in loaded


def test_a_command_starts_without_what_takes_long_to_import(modules):
    assert not modules["import smoothout.lab.cli"] & {"scipy.stats", "scipy.optimize", "matplotlib", "sklearn"}


def test_public_names():
    assert set(smoothout.__all__) == {
        "SmoothOut",
        "AdaSmoothOut",
        "SmoothOutEnsemble",
        "Attachment",
        "Noise",
        "Uniform",
        "Gaussian",
        "Rademacher",
        "Bernoulli",
        "schedule",
        "frozen_statistics",
        "update_bn",
        "__version__",
    }
    for name in smoothout.__all__:
        assert getattr(smoothout, name) is not None
    assert callable(smoothout.suggest_strength)  # lazily, with scipy
    assert callable(smoothout.measure.sharpness)
    assert {*smoothout.__all__, "measure", "suggest_strength"} <= set(dir(smoothout))
