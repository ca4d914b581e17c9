"""Three ways to measure flatness, on F1: is the large batch sharper, is SmoothOut flatter, and do the three agree?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from smoothout.lab.config import Config, resolve
from smoothout.lab.experiments.measuring import curvature, sensitivity, sharpness
from smoothout.lab.experiments.networks import F1, configure, label
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import Experiment, Row, Setting, Verdict
from smoothout.lab.methods import METHODS
from smoothout.lab.report.groups import difference

COMPARED = ("plain", "smoothout", "adasmoothout")
DIGITS_SMALL, DIGITS_LARGE = 48, 718  # of 1,437 images: 30 updates an epoch, and 3
MEASURES: dict[str, tuple[str, Callable[[Any], float]]] = {
    "sharpness": ("sharpness-train", lambda result: result.value),
    "slope under noise": ("sensitivity-train", lambda result: result.slope),
    "top eigenvalue": ("curvature-train", lambda result: result.eigenvalues[0]),
}


def flatness(setting: Setting) -> Experiment:
    return Experiment(
        "flatness",
        "Flatness by three measures, on F1",
        tuple(row for family in _families(setting).values() for row in _rows(setting, family)),
        judge=partial(_judge, setting),
        notes=("Ratios are of geometric means over seeds, with 95 % intervals of the paired logarithms.",),
    )


def _families(setting: Setting) -> dict[str, dict[tuple[str, str], Config]]:
    """By data set, the configurations by (batch, method)."""
    batches = {"small": F1.small, "large": F1.large}
    mnist = {(b, m): configure(setting, F1, size, m) for b, size in batches.items() for m in COMPARED}
    if setting.scale == "tiny":
        return {"the digits": mnist}
    batches = {"small": DIGITS_SMALL, "large": DIGITS_LARGE}
    digits = {
        (b, m): resolve(dataset="digits", model="f1", batch_size=size, method=m, preset=setting.preset)
        for b, size in batches.items()
        for m in COMPARED
    }
    return {"MNIST": mnist, "the digits": digits}


def _rows(setting: Setting, family: dict[tuple[str, str], Config]) -> list[Row]:
    wanted = (sharpness(setting), sensitivity(setting), curvature(setting))
    rows = []
    for (batch, method), config in family.items():
        on_digits = config.dataset == "digits" and setting.scale == "paper"
        size = config.batch_size if on_digits else {"small": F1.small, "large": F1.large}[batch]
        baseline = None if method == "plain" else family[batch, "plain"]
        text = label(F1, size, method, ", on the digits" if on_digits else "")
        rows.append(Row(text, config, versus=baseline, measurements=wanted))
    return rows


def _judge(setting: Setting, records: Records) -> tuple[Verdict, ...]:
    verdicts: list[Verdict] = []
    for data, family in _families(setting).items():
        pairs = {
            "the large batch is sharper than the small one": (family["small", "plain"], family["large", "plain"], 1),
            **{
                f"{METHODS[m].title} is flatter than the baseline at batch {family[b, m].batch_size}": (
                    *(family[b, "plain"], family[b, m]),
                    -1,
                )
                for b in ("small", "large")
                for m in COMPARED[1:]
            },
        }
        verdicts += [_verdict(f"{data}: {claim}", records, *pair) for claim, pair in pairs.items()]
    return tuple(verdicts)


def _verdict(claim: str, records: Records, base: Config, other: Config, sense: int) -> Verdict:
    """Whether every measure shows that `other` differs from `base` in the sense of the claim."""
    found, texts = [], []
    for name, (kept, value) in MEASURES.items():
        before, after = (_values(records, config, kept, value) for config in (base, other))
        seeds = sorted(set(before) & set(after))
        if len(seeds) < 3:
            return Verdict(claim, "not measured yet", f"{len(seeds)} seeds have {name} of both; at least 3 are needed")
        logs = difference([before[s] for s in seeds], [after[s] for s in seeds], paired=True)
        found.append(0 if logs is None or not logs.is_shown else int(math.copysign(1, logs.mean)))
        assert logs is not None
        low, middle, high = (math.exp(x) for x in (logs.low, logs.mean, logs.high))
        texts.append(f"{name} × {middle:.3g} [{low:.3g}, {high:.3g}]")
    return Verdict(claim, _in_words(found, sense), f"{', '.join(texts)} (n = {len(seeds)})")


def _values(records: Records, config: Config, kept: str, value: Callable[[Any], float]) -> dict[int, float]:
    """Logarithms by seed; what is not positive has none."""
    results = {f.run.config.seed: f.measurement(kept) for f in records.seeds_of(config)}
    return {seed: math.log(value(r)) for seed, r in results.items() if r is not None and value(r) > 0}


def _in_words(found: Sequence[int], sense: int) -> str:
    agreeing = sum(each == sense for each in found)
    against = sum(each == -sense for each in found)
    if agreeing == len(found):
        return "holds by all three"
    if against == len(found):
        return "does not hold: the opposite by all three"
    named = [
        f"{name} {'says so' if e == sense else 'the opposite' if e else 'shows nothing'}"
        for name, e in zip(MEASURES, found)
    ]
    return "the three do not agree: " + ", ".join(named)
