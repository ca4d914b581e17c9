"""The paper's networks with their data, at both scales, and how a run of one is configured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from smoothout.lab.config import Config, resolve
from smoothout.lab.experiments.chosen import CHOSEN
from smoothout.lab.experiments.vocabulary import Setting
from smoothout.lab.methods import METHODS


@dataclass(frozen=True)
class Network:
    """A network of the paper on its data.

    Args:
        small, large: the batch sizes that are compared.
        tiny_model: what stands in for it at tiny scale, on the digits.
    """

    title: str
    model: str
    dataset: str
    small: int
    large: int
    tiny_model: str
    is_convolutional: bool = True


F1 = Network("F1, MNIST", "f1", "mnist", 256, 6000, "mlp", is_convolutional=False)
C1 = Network("C1, CIFAR-10", "c1", "cifar10", 256, 5000, "c1")
C3 = Network("C3, CIFAR-100", "c3", "cifar100", 256, 5000, "c1")
RESNET44 = Network("ResNet44, CIFAR-10", "resnet44", "cifar10", 128, 2048, "resnet20")
RESNET44_CIFAR100 = Network("ResNet44, CIFAR-100", "resnet44", "cifar100", 128, 1024, "resnet20")
ALEXNET = Network("AlexNet, ImageNet", "alexnet", "imagenet", 256, 16384, "c1")
RESNET18 = Network("ResNet18, ImageNet", "resnet18", "imagenet", 256, 16384, "resnet20")
F1_DIGITS = Network("F1, digits", "f1", "digits", 48, 718, "mlp", is_convolutional=False)  # not of the paper
DIGITS = Network("MLP, digits", "mlp", "digits", 48, 480, "mlp", is_convolutional=False)  # not of the paper

IMAGENETTE = "imagenette"
IMAGENETTE_LARGE = 512  # of its 2,500 training images: 4 ghosts of 128. ResNet18 learns nothing in 60 updates at 2048
TINY_SMALL, TINY_LARGE = 48, 480  # of the digits' 1,437
TINY_EPOCHS_OF = 50  # one tiny epoch for so many of the paper's, but two at least


def configure(setting: Setting, network: Network, batch_size: int, method: str, **settings: Any) -> Config:
    """The run of a network at a scale and in a preset; `settings` are those of `smoothout.lab.config`.

    Preset `ours` adds what was chosen on held-out images to what is not given: the baseline's choice, which is that of
    every method, and the method's own. Where a preset changes nothing against the text, as for baselines of small
    networks, the run is that of preset `paper`: it is trained once.
    """
    by_the_text = configure_as_given(replace(setting, preset="paper"), network, batch_size, method, **settings)
    if setting.preset == "ours":
        chosen = [CHOSEN.get((network.model, batch_size, each), {}) for each in ("plain", method)]
        settings = {**chosen[0], **chosen[1], **settings}
    config = configure_as_given(setting, network, batch_size, method, **settings)
    return by_the_text if replace(config, preset="paper") == by_the_text else config


def as_published(setting: Setting) -> Setting:
    """For experiments that vary the paper's own strengths: preset ours has others, so it takes preset paper's runs."""
    return replace(setting, preset="paper") if setting.preset == "ours" else setting


def configure_as_given(setting: Setting, network: Network, batch_size: int, method: str, **settings: Any) -> Config:
    """The same without what was chosen. Convolutional networks are trained in bf16 and channels-last at paper scale."""
    if setting.scale == "tiny":
        return _tiny(setting, network, batch_size, method, settings)
    dataset = network.dataset
    if dataset == "imagenet":
        dataset = f"imagefolder:{setting.imagenet}" if setting.imagenet else IMAGENETTE
        batch_size = batch_size if setting.imagenet else min(batch_size, IMAGENETTE_LARGE)
    if network.is_convolutional:
        settings = {"amp": "bf16", "channels_last": True, **settings}
    return resolve(
        dataset=dataset, model=network.model, batch_size=batch_size, method=method, preset=setting.preset, **settings
    )


def _tiny(setting: Setting, network: Network, batch_size: int, method: str, settings: dict[str, Any]) -> Config:
    usual = settings.get("epochs", resolve(model=network.model, method="plain").epochs)
    epochs = max(2, math.ceil(usual / TINY_EPOCHS_OF))
    stop_after = math.ceil(settings.get("stop_after", 0) * epochs / usual)
    settings = {**settings, "epochs": epochs, "stop_after": stop_after}
    settings |= {"hold_out": 300} if settings.get("hold_out") else {}
    return resolve(
        dataset="digits",
        model=network.tiny_model,
        batch_size=TINY_SMALL if batch_size <= 256 else TINY_LARGE,
        method=method,
        preset=setting.preset,
        **settings,
    )


def label(network: Network, batch_size: int, method: str, more: str = "") -> str:
    """What a row is called."""
    return f"{network.title}, batch {batch_size}: {METHODS[method].title}{more}"
