"""SAM on C1 beside the baseline and our methods, each with what was chosen on held-out images; not of the paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from smoothout.lab.experiments.choice import CHOSEN, RADII
from smoothout.lab.experiments.networks import C1, configure, label
from smoothout.lab.experiments.vocabulary import Experiment, Row, Setting
from smoothout.lab.methods import METHODS

SHARES = {"sam": (1, 2)}  # of the epochs: SAM has two gradient evaluations a step, so half of them cost the same


def sam(setting: Setting) -> Experiment:
    setting = replace(setting, preset="ours")  # whichever is asked for: no other chooses
    rows: list[Row] = []
    for batch_size in (C1.small, C1.large):
        if (C1.model, batch_size, "sam") not in CHOSEN:  # nothing to compare with yet
            continue
        baseline = configure(setting, C1, batch_size, "plain")
        for method in ("plain", "smoothout", "adasmoothout", "sam"):
            for share in SHARES.get(method, (1,)):
                how: dict[str, Any] = {} if share == 1 else {"epochs": baseline.epochs // share}
                more = "" if share == 1 else ", half the epochs"
                rows.append(
                    Row(
                        label(C1, batch_size, method, _chosen(batch_size, method) + more),
                        configure(setting, C1, batch_size, method, **how),
                        versus=None if method == "plain" else baseline,
                    )
                )
    return Experiment(
        "sam",
        "SAM on C1, small and large batch",
        tuple(rows),
        notes=(
            "SAM takes two gradient evaluations a step, all others one: its rows of half the epochs cost as many "
            f"evaluations as the baseline. Its radius was chosen out of {len(RADII)} for each batch size on held-out "
            "training images, the strengths and schedules of the others out of nine.",
        ),
        compares_costs=True,
    )


def _chosen(batch_size: int, method: str) -> str:
    found = CHOSEN.get((C1.model, batch_size, method), {})
    symbol = "a" if METHODS[method].radius is None else "ρ"
    return f", {symbol} = {found['strength']:g}" if found else ""
