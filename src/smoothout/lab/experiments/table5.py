"""Table 5: uniform against Gaussian noise, and noise alone; on ResNet44 as in the paper, and on C1 beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from smoothout.lab.config import Config
from smoothout.lab.experiments.networks import C1, RESNET44, Network, as_published, configure, label
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.table2 import resnet44
from smoothout.lab.experiments.table3 import noise_left
from smoothout.lab.experiments.verdicts import on_difference
from smoothout.lab.experiments.vocabulary import Experiment, Row, Setting, Verdict
from smoothout.lab.groups import reported
from smoothout.lab.methods import METHODS

# (method, what is added to the label, settings, the paper's accuracy on ResNet44)
VARIANTS: tuple[tuple[str, str, dict[str, Any], float], ...] = (
    ("plain", "", {}, 91.02),
    ("smoothout", ", uniform", {}, 91.95),
    ("smoothout", ", Gaussian", {"noise": "gaussian", "strength": 0.025}, 91.53),
    ("adasmoothout", ", uniform", {}, 92.63),
    ("adasmoothout", ", Gaussian", {"noise": "gaussian", "strength": 0.20}, 92.44),
    ("smoothout", ", uniform noise only, a = 1e-4", {"strength": 1e-4, "denoise": False}, 91.15),
    (
        "smoothout",
        ", Gaussian noise only, a = 1.5e-4",
        {"noise": "gaussian", "strength": 1.5e-4, "denoise": False},
        91.38,
    ),
)


def table5(setting: Setting) -> Experiment:
    setting = as_published(setting)
    deep, shallow = [], []
    for method, more, variant, accuracy in VARIANTS:
        settings = variant if variant.get("denoise", True) else {**variant, **noise_left(setting)}
        deep.append((label(RESNET44, RESNET44.large, method, more), resnet44(setting, method, **settings), accuracy))
        config = configure(setting, C1, C1.large, method, **settings)
        shallow.append((label(C1, C1.large, method, more), config, None))
    configs = {network: [config for _, config, _ in rows] for network, rows in ((RESNET44, deep), (C1, shallow))}
    return Experiment(
        "table5",
        "Table 5: uniform and Gaussian noise, and noise only",
        (*_against_first(deep), *_against_first(shallow)),
        notes=("The rows of C1 are ours: the paper has ResNet44 only.",),
        judge=partial(_judge, configs),
    )


def _judge(configs: Mapping[Network, Sequence[Config]], records: Records) -> tuple[Verdict, ...]:
    """What the paper reads from the table: rows against each other, not against the baseline."""
    verdicts = []
    for network, (_, uniform, gaussian, ada, ada_gaussian, *_) in configs.items():
        for before, after in ((gaussian, uniform), (ada_gaussian, ada)):
            claim = f"{network.title}: {METHODS[after.method].title} is better with uniform noise than with Gaussian"
            verdicts.append(on_difference(claim, before, after, records, reported))
    return tuple(verdicts)


def _against_first(rows: list[tuple[str, Config, float | None]]) -> tuple[Row, ...]:
    baseline = rows[0][1]
    return tuple(
        Row(text, config, accuracy, versus=None if config == baseline else baseline) for text, config, accuracy in rows
    )
