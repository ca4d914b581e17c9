"""Figure 5: ResNet44 along filter-normalised directions, training and validation, baseline and AdaSmoothOut."""

from __future__ import annotations

from smoothout.lab.experiments.figure2 import SPLITS
from smoothout.lab.experiments.measuring import landscape
from smoothout.lab.experiments.networks import RESNET44, label
from smoothout.lab.experiments.table2 import resnet44
from smoothout.lab.experiments.vocabulary import Curve, Drawing, Experiment, Row, Setting
from smoothout.lab.methods import METHODS


def figure5(setting: Setting) -> Experiment:
    configs = {method: resnet44(setting, method) for method in ("plain", "adasmoothout")}
    wanted = {split: landscape(setting, RESNET44.model, split) for split in SPLITS}
    rows = tuple(
        Row(label(RESNET44, RESNET44.large, method), config, measurements=tuple(wanted.values()))
        for method, config in configs.items()
    )
    parts = {"train": "(a) training images", "test": "(b) validation images"}
    drawings = tuple(
        Drawing(
            "landscape",
            f"{parts[split]}: the mean over directions, and a band from the lowest to the highest.",
            tuple(Curve(METHODS[method].title, config, wanted[split]) for method, config in configs.items()),
        )
        for split in SPLITS
    )
    return Experiment("figure5", "Figure 5: ResNet44 along filter-normalised directions", rows, drawings=drawings)
