"""SAM on C1 beside the baseline and our methods, each with what was chosen on held-out images; not of the paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from smoothout.lab.config import Config
from smoothout.lab.experiments.choice import candidates
from smoothout.lab.experiments.chosen import CHOSEN
from smoothout.lab.experiments.networks import C1, configure, label
from smoothout.lab.experiments.vocabulary import Experiment, Row, Setting
from smoothout.lab.methods import METHODS


def sam(setting: Setting) -> Experiment:
    setting = replace(setting, preset="ours")  # whichever is asked for: no other chooses
    rows: list[Row] = []
    for batch_size in (C1.small, C1.large):
        if (C1.model, batch_size, "sam") not in CHOSEN and setting.scale == "paper":  # nothing to compare with yet
            continue
        baseline = configure(setting, C1, batch_size, "plain")
        rows += [
            _row(setting, batch_size, baseline, method) for method in ("plain", "smoothout", "adasmoothout", "sam")
        ]
        rows.append(_row(setting, batch_size, baseline, "sam", ", half the epochs", epochs=baseline.epochs // 2))
    tries = {method: len(candidates(setting, C1, C1.large, method)) for method in ("sam", "smoothout")}
    return Experiment(
        "sam",
        "SAM on C1, small and large batch",
        tuple(rows),
        notes=(
            "SAM takes two gradient evaluations a step, all others one: its rows of half the epochs cost as many "
            f"evaluations as the baseline. Its radius was chosen out of {tries['sam']} for each batch size on held-out "
            f"training images, the strengths and schedules of the others out of {tries['smoothout']}.",
        ),
        compares_costs=True,
    )


def _row(setting: Setting, batch_size: int, baseline: Config, method: str, more: str = "", **settings: Any) -> Row:
    config = configure(setting, C1, batch_size, method, **settings)
    if method == "plain":
        return Row(label(C1, batch_size, method), config)
    strength = f", {METHODS[method].symbol} = {config.strength:g}"
    return Row(label(C1, batch_size, method, strength + more), config, versus=baseline)
