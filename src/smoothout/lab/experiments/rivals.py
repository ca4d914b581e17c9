"""Every method of the lab on the digits, small and large batch, with what each costs; not of the paper.

Each method with a number to choose has as many tries as any other, judged on training images held out
(`rivals_choice`); a test holds CHOSEN to what the records of those runs say.
"""

from __future__ import annotations

import math
from typing import Any

from smoothout.lab.config import Config
from smoothout.lab.experiments.measuring import sensitivity, sharpness
from smoothout.lab.experiments.networks import DIGITS, configure, label
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import Experiment, Row, Setting
from smoothout.lab.methods import METHODS

HELD_OUT = 300
STRENGTH, FACTORS = "strength", (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
# (which setting, its values)
GRIDS: dict[str, tuple[str, tuple[float, ...]]] = {
    **{
        method: (STRENGTH, tuple(usual * factor for factor in FACTORS))
        for method, usual in {
            "smoothout": 0.0375,
            "adasmoothout": 0.15,
            "lpfsgd": 0.2,
            "sam": 0.05,
            "asam": 0.5,
        }.items()
    },
    "swa": ("swa_start", (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)),
    "ema": ("ema_decay", (0.5, 0.8, 0.9, 0.97, 0.99, 0.995, 0.999)),
}
BATCHES = (DIGITS.small, DIGITS.large)
# At the small and the large batch: what `best` says of the records in results/.
CHOSEN: dict[str, tuple[float, float]] = {
    "smoothout": (0.009375, 0.0046875),
    "adasmoothout": (0.075, 0.0375),
    "lpfsgd": (0.05, 0.05),
    "sam": (0.2, 0.2),
    "asam": (1.0, 0.5),
    "swa": (0.0, 0.95),
    "ema": (0.995, 0.8),
}
EPOCHS = 30


def candidate(setting: Setting, method: str, batch_size: int, value: float) -> Config:
    """A try, judged on training images held out."""
    return configure(setting, DIGITS, batch_size, method, hold_out=HELD_OUT, **{GRIDS[method][0]: value})


def best(setting: Setting, method: str, batch_size: int, records: Records) -> float:
    """The value with the most right answers on held-out images, of equals that of the smaller loss; none may diverge.

    Raises ValueError where not every value has the same number of runs.
    """
    scores: dict[float, tuple[int, float]] = {}
    counts = set()
    for value in GRIDS[method][1]:
        found = records.seeds_of(candidate(setting, method, batch_size, value))
        counts.add(len(found))
        judged = [each.run.record.last for each in found if each.run.record is not None]
        if len(judged) == len(found):
            right = sum(round(metrics.test_accuracy * HELD_OUT) for metrics in judged)
            scores[value] = right, -math.fsum(metrics.test_loss for metrics in judged)
    if len(counts) != 1 or counts == {0}:
        raise ValueError(
            f"{method}, batch {batch_size}: the values have {sorted(counts)} runs, not all the same number"
        )
    return max(scores, key=scores.__getitem__)


def rivals_choice(setting: Setting) -> Experiment:
    rows: list[Row] = []
    for batch_size in BATCHES:
        baseline = configure(setting, DIGITS, batch_size, "plain", hold_out=HELD_OUT)
        rows.append(Row(label(DIGITS, batch_size, "plain"), baseline))
        for method, (_, values) in GRIDS.items():
            for value in values:
                config = candidate(setting, method, batch_size, value)
                rows.append(
                    Row(label(DIGITS, batch_size, method, f", {_in_words(method, value)}"), config, versus=baseline)
                )
    return Experiment(
        "rivals_choice",
        f"Rivals on the digits: their one number, judged on {HELD_OUT} held-out training images",
        tuple(rows),
        notes=("Accuracies here are on held-out training images, not on the test set.",),
    )


def rivals(setting: Setting) -> Experiment:
    rows: list[Row] = []
    for batch_size in BATCHES:
        baseline = configure(setting, DIGITS, batch_size, "plain", epochs=EPOCHS)
        for method in ("plain", *GRIDS):
            rows.append(_row(setting, batch_size, method, baseline, EPOCHS))
        for method in GRIDS:
            if METHODS[method].evaluations == 2:
                rows.append(_row(setting, batch_size, method, baseline, EPOCHS // 2, ", half the epochs"))
    return Experiment(
        "rivals",
        "Rivals on the digits, small and large batch",
        tuple(rows),
        notes=(
            f"{EPOCHS} epochs for every method. SAM and ASAM take two gradient evaluations a step, all others one: "
            "their rows of half the epochs cost as many evaluations as the baseline. The number of each method was "
            f"chosen out of {len(FACTORS)} for each batch size on held-out training images.",
            "Seconds are of training and judging every epoch, one process with one thread; their spread is that of the "
            "machine's other work. SWA and EMA train as the baseline does and differ in the weights that "
            "are judged. LPF-SGD takes one draw a step here; its authors take several, each for a part of the batch.",
        ),
        compares_costs=True,
    )


def _row(setting: Setting, batch_size: int, method: str, baseline: Config, epochs: int, more: str = "") -> Row:
    chosen: dict[str, Any] = {}
    if method in CHOSEN:
        value = CHOSEN[method][BATCHES.index(batch_size)]
        chosen = {GRIDS[method][0]: value}
        more = f", {_in_words(method, value)}{more}"
    return Row(
        label(DIGITS, batch_size, method, more),
        configure(setting, DIGITS, batch_size, method, epochs=epochs, **chosen),
        versus=None if method == "plain" else baseline,
        measurements=(sharpness(setting), sensitivity(setting)),
    )


def _in_words(method: str, value: float) -> str:
    name = GRIDS[method][0]
    symbols = {STRENGTH: METHODS[method].symbol, "swa_start": "from", "ema_decay": "decay"}
    return f"{symbols[name]} {value:g}" if name == "swa_start" else f"{symbols[name]} = {value:g}"
