"""How each network of the paper is optimised: rates, decay points, epochs; scaling with the batch; training longer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smoothout.lab.config import Config

BASE_BATCH = 128
SCALINGS: dict[str, Callable[[float], float]] = {
    "none": lambda ratio: 1.0,
    "sqrt": math.sqrt,
    "linear": lambda ratio: ratio,
}


@dataclass(frozen=True)
class Regime:
    """Settings of a network at its usual length of training; rates are for batch 128."""

    epochs: int
    optimizer: str
    lr: float
    momentum: float = 0.9
    weight_decay: float = 0.0
    milestones: tuple[int, ...] = ()
    lr_scaling: str = "none"
    augment: str = "none"

    def settings(self, epochs: int | None = None) -> dict[str, Any]:
        """The settings of a run of `epochs`: the decay points keep their place in training (training longer)."""
        length = self.epochs if epochs is None else epochs
        return {
            "epochs": length,
            "optimizer": self.optimizer,
            "lr": self.lr,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "milestones": tuple(max(1, round(each * length / self.epochs)) for each in self.milestones),
            "lr_scaling": self.lr_scaling,
            "augment": self.augment,
        }


# F1: 50 epochs and this optimizer are bigBatch's, the paper does not say. Table 1 lists no learning-rate scaling.
_FULLY_CONNECTED = Regime(50, "sgd", 0.1, weight_decay=1e-4, milestones=(10, 20, 30))
# C1, C3: Adam by the captions; the length is ours, and "no augmentation" is what the accuracies fit.
_SHALLOW = Regime(100, "adam", 1e-3)
_CIFAR_RESNET = Regime(
    200, "sgd", 0.1, weight_decay=1e-4, milestones=(81, 122, 164), lr_scaling="sqrt", augment="pad-crop-flip"
)
REGIMES: dict[str, Regime] = {
    "mlp": Regime(30, "sgd", 0.1, weight_decay=1e-4),  # not of the paper
    "f1": _FULLY_CONNECTED,
    "c1": _SHALLOW,
    "c3": _SHALLOW,
    **{f"resnet{depth}": _CIFAR_RESNET for depth in (20, 32, 44, 56, 110)},
    # Weight decay 0 by the paper's text, for both networks of ImageNet.
    "alexnet": Regime(60, "sgd", 0.01, milestones=(20, 40), lr_scaling="sqrt", augment="random-crop"),
    "resnet18": Regime(90, "sgd", 0.1, milestones=(30, 60), lr_scaling="sqrt", augment="resized-crop"),
}
_UNKNOWN_NETWORK = Regime(50, "sgd", 0.1, weight_decay=1e-4)


def regime_of(model: str) -> Regime:
    """The regime of a network; for a user's own a plain one without decay."""
    return REGIMES.get(model, _UNKNOWN_NETWORK)


def scaled_rate(config: Config) -> float:
    """The learning rate for the batch size, before warm-up and decay."""
    return config.lr * SCALINGS[config.lr_scaling](config.batch_size / BASE_BATCH)


def learning_rate(config: Config, epoch: int, step: int, steps_per_epoch: int) -> float:
    """The rate of update `step` of `epoch`, both from 0: a pure function, so a resumed run needs no scheduler state."""
    decays = sum(epoch >= milestone for milestone in config.milestones)
    rate = scaled_rate(config) * config.lr_decay**decays
    warmup_steps = config.lr_warmup * steps_per_epoch
    done = epoch * steps_per_epoch + step + 1
    return rate * min(1.0, done / warmup_steps) if warmup_steps else rate
