"""Table 3: without de-noising at the strength that de-noising bears."""

from __future__ import annotations

from typing import Any

from smoothout.lab.experiments.networks import C1, RESNET44, as_published, configure, label
from smoothout.lab.experiments.table2 import resnet44
from smoothout.lab.experiments.vocabulary import Experiment, Row, Setting

A = 0.0375
PAPER = {256: (81.72, 36.52), 5000: (80.34, 46.05), 2048: (91.95, 27.57)}
WITHOUT = " without de-noising"


def noise_left(setting: Setting) -> dict[str, Any]:
    """Without de-noising. One draw a step: many would pile up in the weights, as only the authors' code let them."""
    return {"denoise": False} | ({} if setting.preset == "authors" else {"draws": "one"})


def table3(setting: Setting) -> Experiment:
    setting = as_published(setting)
    rows = []
    for batch_size in (C1.small, C1.large):
        kept = configure(setting, C1, batch_size, "smoothout", strength=A)
        left = configure(setting, C1, batch_size, "smoothout", strength=A, **noise_left(setting))
        with_, without = PAPER[batch_size]
        rows.append(Row(label(C1, batch_size, "smoothout"), kept, with_))
        rows.append(Row(label(C1, batch_size, "smoothout", WITHOUT), left, without, versus=kept))
    with_, without = PAPER[RESNET44.large]
    kept = resnet44(setting, "smoothout", strength=A)
    left = resnet44(setting, "smoothout", strength=A, **noise_left(setting))
    rows.append(Row(label(RESNET44, RESNET44.large, "smoothout"), kept, with_))
    rows.append(Row(label(RESNET44, RESNET44.large, "smoothout", WITHOUT), left, without, versus=kept))
    return Experiment("table3", f"Table 3: the noise left in the weights, a = {A}", tuple(rows))
