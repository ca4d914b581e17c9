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
    """Seconds of training: so many for each forward and backward pass, and for each image in it."""

    per_pass: float
    per_image: float


# An epoch of C1 took 0.094 s at batch 256 as one of five side by side, 0.153 s alone; of ResNet44 0.70 s as 391 ghosts.
# F1 at 6000 took 0.04 s while another program used the GPU. The others are not measured: by their operations.
H200: dict[str, Speed] = {
    "mlp": Speed(2e-4, 1e-7),
    "f1": Speed(2e-4, 4e-7),
    "c1": Speed(2.5e-4, 9e-7),
    "c3": Speed(2.5e-4, 9e-7),
    "resnet20": Speed(6e-4, 2e-6),
    "resnet44": Speed(1.2e-3, 4e-6),
    "alexnet": Speed(4e-3, 2e-4),
    "resnet18": Speed(4e-3, 4e-4),
}
UNKNOWN = Speed(4e-3, 1e-4)
# A measurement runs in fp32, without graphs: C1's took 4.5 µs an image with a gradient (60 evaluations in 13.6 s), and
# half of that without one (21 in 2.6 s).
WITH_GRADIENT, WITHOUT = 5.0, 2.7
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
            if record is None or command[1:2] != ["reproduce"] or "--jobs" in command:
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
        return START + config.epochs * evaluations * (passes * speed.per_pass + images * speed.per_image)

    def measuring(self, config: Config, wanted: Measuring | Line) -> float:
        """One measurement of a run."""
        images = min(_images(config), wanted.images or _images(config))
        cost = {"train": images, "test": min(images, 10_000)}[wanted.split] * H200.get(config.model, UNKNOWN).per_image
        if isinstance(wanted, Line):
            return 1 + len(wanted.alphas) * WITHOUT * cost
        settings = dict(wanted.settings)
        if wanted.kind == "sharpness":
            return 1 + settings["restarts"] * SHARPNESS_EVALUATIONS * WITH_GRADIENT * cost
        if wanted.kind == "sensitivity":
            return 1 + len(settings["strengths"]) * settings["draws"] * WITHOUT * cost
        if wanted.kind == "curvature":
            return 1 + (settings["probes"] + settings["max_iterations"]) * 2 * WITH_GRADIENT * cost
        return 1 + settings["directions"] * settings["steps"] * WITHOUT * cost


def _images(config: Config) -> int:
    return TRAINING_IMAGES.get(config.dataset, IMAGENET_IMAGES) - config.hold_out
