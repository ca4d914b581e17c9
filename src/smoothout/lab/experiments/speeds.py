"""What a run costs on one H200, from measured speeds: the one place where they are written down.

Records made by `smoothout reproduce` in one process, alone on their device, take the place of the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from smoothout.lab.config import Config
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import Line, Measuring
from smoothout.lab.methods import METHODS
from smoothout.lab.train.build import ghost_batches

START = 4.0  # seconds: data, model, graphs, files


@dataclass(frozen=True)
class Speed:
    """Seconds of training for each forward and backward pass and for each image in it; of measuring for each image.

    Measurements run in fp32 and without graphs, here with a gradient.
    """

    per_pass: float
    per_image: float
    measured: float


# An epoch of C1 took 0.07 s at batch 256 and 0.05 s at 5000, as one of five side by side; of ResNet44 0.32 s as 400
# ghosts, and judging 10,000 images about 0.03; of F1 0.05 s at 256, 0.03 at 6000. C1's loss and gradient took 0.144 s,
# F1's 0.045. The others are not measured: by their operations.
H200: dict[str, Speed] = {
    "mlp": Speed(2e-4, 1e-7, 5e-7),
    "f1": Speed(1e-4, 4e-7, 8e-7),
    "c1": Speed(1.2e-4, 9.5e-7, 2.9e-6),
    "c3": Speed(1.5e-4, 1.75e-6, 2.9e-6),
    "resnet20": Speed(2e-4, 2e-6, 1.2e-5),
    "resnet44": Speed(4e-4, 3.8e-6, 2.5e-5),
    "alexnet": Speed(4e-3, 2e-4, 5e-4),
    "resnet18": Speed(4e-3, 4e-4, 1e-3),
}
# ResNet44's speed is that of ghosts seen all at once. What cannot be done so takes so many times as long: several draws
# for every ghost, or, one by one, several that stay in the weights, and a batch that is a single ghost.
SEVERAL_DRAWS, ONE_BY_ONE = 1.7, 4.0
UNKNOWN = Speed(4e-3, 1e-4, 5e-4)
WITHOUT_GRADIENT = 0.55
SHARPNESS_EVALUATIONS = 12  # a start
TRAINING_IMAGES = {
    "digits": 1437,
    "mnist": 60_000,
    "cifar10": 50_000,
    "cifar100": 50_000,
    "imagenette": 2_500,
}
IMAGENET_IMAGES = 1_281_167


class Speeds:
    """Estimates in seconds; what was measured here before wins over the table."""

    def __init__(self, records: Records | None = None) -> None:
        self._measured: dict[str, float] = {}
        for found in records.all() if records else ():
            record = found.run.record
            command = record.provenance.command.split() if record else []
            if record is None or command[1:2] != ["reproduce"] or any(word.startswith("--jobs") for word in command):
                continue  # others may have shared their device
            key = found.run.config.with_seed(0).hash
            self._measured[key] = min(record.seconds, self._measured.get(key, math.inf))

    def training(self, config: Config) -> float:
        """One run, start included."""
        known = self._measured.get(config.with_seed(0).hash)
        if known is not None:
            return START + known
        speed = H200.get(config.model, UNKNOWN)
        images = _images(config)
        passes = math.ceil(images / config.batch_size) * (ghost_batches(config) if config.ghost_by == "loop" else 1)
        evaluations = METHODS[config.method].evaluations * (config.draws_number or 1)
        slower = _slower(config) if config.model == "resnet44" else 1.0
        return START + config.epochs_trained * evaluations * slower * (
            passes * speed.per_pass + images * speed.per_image
        )

    def measuring(self, config: Config, wanted: Measuring | Line) -> float:
        """One measurement of a run."""
        images = min(_images(config), wanted.images or _images(config))
        images = images if wanted.split == "train" else min(images, 10_000)
        cost = images * H200.get(config.model, UNKNOWN).measured
        if isinstance(wanted, Line):
            return 1 + len(wanted.alphas) * WITHOUT_GRADIENT * cost
        settings = dict(wanted.settings)
        if wanted.kind == "sharpness":
            return 1 + settings["restarts"] * SHARPNESS_EVALUATIONS * cost
        if wanted.kind == "sensitivity":
            return 1 + len(settings["strengths"]) * settings["draws"] * WITHOUT_GRADIENT * cost
        if wanted.kind == "curvature":
            return 1 + (settings["probes"] + settings["max_iterations"]) * 2 * cost
        return 1 + settings["directions"] * settings["steps"] * WITHOUT_GRADIENT * cost


def _slower(config: Config) -> float:
    several = (config.draws_number or 1) > 1
    if ghost_batches(config) == 1 or (several and not config.denoise):
        return ONE_BY_ONE
    return SEVERAL_DRAWS if several else 1.0


def _images(config: Config) -> int:
    return TRAINING_IMAGES.get(config.dataset, IMAGENET_IMAGES) - config.hold_out
