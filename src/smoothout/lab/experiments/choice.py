"""Strengths and schedules judged on 5,000 training images held out: what preset `ours` chooses from."""

from __future__ import annotations

from typing import Any

from smoothout.lab.config import Config
from smoothout.lab.experiments.networks import C1, F1, RESNET44, Network, configure, label
from smoothout.lab.experiments.vocabulary import Experiment, Row, Setting

HELD_OUT = 5000
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
USUAL = {"smoothout": 0.0375, "adasmoothout": 0.15}
SCHEDULES = ("linear", "tanh")  # beside the constant one, at once and twice the strength
DEEP_EPOCHS = 100  # of ResNet44: a quarter of the row's length


def held_out(setting: Setting, network: Network, batch_size: int, method: str, **settings: Any) -> Config:
    """A run judged on held-out training images; whatever was chosen before does not count."""
    if method in USUAL:
        settings = {"strength": USUAL[method], **settings}
    if network is RESNET44:
        settings = {"epochs": DEEP_EPOCHS, **settings}
    return configure(setting, network, batch_size, method, hold_out=HELD_OUT, **settings)


def robustness_rows(setting: Setting, network: Network, batch_size: int, method: str) -> list[Row]:
    """a × ¼ … × 4, constant."""
    baseline = held_out(setting, network, batch_size, "plain")
    return [
        Row(
            label(network, batch_size, method, f", a = {USUAL[method] * factor:g}"),
            held_out(
                setting, network, batch_size, method, strength=USUAL[method] * factor, strength_schedule="constant"
            ),
            versus=baseline,
        )
        for factor in FACTORS
    ]


def choice(setting: Setting) -> Experiment:
    rows: list[Row] = []
    for network, batches in ((F1, (F1.small, F1.large)), (C1, (C1.small, C1.large)), (RESNET44, (RESNET44.large,))):
        for batch_size in batches:
            baseline = held_out(setting, network, batch_size, "plain")
            rows.append(Row(label(network, batch_size, "plain"), baseline))
            for method in USUAL:
                rows += robustness_rows(setting, network, batch_size, method)
                rows += _scheduled(setting, network, batch_size, method, baseline)
    return Experiment(
        "choice",
        f"Strength and schedule, judged on {HELD_OUT:,} held-out training images",
        tuple(rows),
        notes=("Accuracies here are on held-out training images, not on the test set.",),
    )


def _scheduled(setting: Setting, network: Network, batch_size: int, method: str, baseline: Config) -> list[Row]:
    return [
        Row(
            label(network, batch_size, method, f", a = {USUAL[method] * factor:g}, {schedule}"),
            held_out(setting, network, batch_size, method, strength=USUAL[method] * factor, strength_schedule=schedule),
            versus=baseline,
        )
        for schedule in SCHEDULES
        for factor in (1.0, 2.0)
    ]
