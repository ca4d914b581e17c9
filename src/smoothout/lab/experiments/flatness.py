"""Three ways to measure flatness, on F1: is the large batch sharper, is SmoothOut flatter, and do the three agree?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from smoothout.lab.config import Config
from smoothout.lab.experiments.measuring import curvature, sensitivity, sharpness
from smoothout.lab.experiments.networks import F1, F1_DIGITS, Network, configure, label
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import NOT_MEASURED, Experiment, Measuring, Row, Setting, Verdict
from smoothout.lab.groups import FEWEST_RUNS, difference
from smoothout.lab.methods import METHODS

COMPARED = ("plain", "smoothout", "adasmoothout")
MEASURES: dict[str, tuple[Callable[[Setting], Measuring], Callable[[Any], float]]] = {
    "sharpness": (sharpness, lambda result: result.value),
    "slope under noise": (sensitivity, lambda result: result.slope),
    "top eigenvalue": (curvature, lambda result: result.eigenvalues[0]),
}


def flatness(setting: Setting) -> Experiment:
    return Experiment(
        "flatness",
        "Flatness by three measures, on F1",
        tuple(row for network in _networks(setting).values() for row in _rows(setting, network)),
        judge=partial(_judge, setting),
        notes=("Ratios are of geometric means over seeds, with 95 % intervals of the paired logarithms.",),
    )


def _networks(setting: Setting) -> dict[str, Network]:
    """By the name of their data; at tiny scale both would be the same."""
    return {"MNIST": F1} if setting.scale == "tiny" else {"MNIST": F1, "the digits": F1_DIGITS}


def _configs(setting: Setting, network: Network) -> dict[tuple[int, str], Config]:
    """By batch size and method."""
    return {
        (batch, method): configure(setting, network, batch, method)
        for batch in (network.small, network.large)
        for method in COMPARED
    }


def _rows(setting: Setting, network: Network) -> list[Row]:
    wanted = tuple(measuring(setting) for measuring, _ in MEASURES.values())
    configs = _configs(setting, network)
    rows = []
    for (batch, method), config in configs.items():
        baseline = None if method == "plain" else configs[batch, "plain"]
        rows.append(Row(label(network, batch, method), config, versus=baseline, measurements=wanted))
    return rows


def _judge(setting: Setting, records: Records) -> tuple[Verdict, ...]:
    verdicts = []
    for data, network in _networks(setting).items():
        configs = _configs(setting, network)
        large, small = configs[network.large, "plain"], configs[network.small, "plain"]
        judge = partial(_verdict, setting, records)
        verdicts.append(judge(f"{data}: the large batch is sharper than the small one", small, large, 1))
        for (batch, method), config in configs.items():
            if method != "plain":
                claim = f"{data}: {METHODS[method].title} is flatter than the baseline at batch {batch}"
                verdicts.append(judge(claim, configs[batch, "plain"], config, -1))
    return tuple(verdicts)


def _verdict(setting: Setting, records: Records, claim: str, base: Config, other: Config, sense: int) -> Verdict:
    """Whether every measure shows that `other` differs from `base` in the sense of the claim."""
    found, texts, counts = [], [], []
    for name, (measuring, value) in MEASURES.items():
        before, after = (_values(records, config, measuring(setting), value) for config in (base, other))
        seeds = sorted(set(before) & set(after))
        if len(seeds) < FEWEST_RUNS:
            return Verdict(
                claim, NOT_MEASURED, f"{len(seeds)} seeds have {name} of both; at least {FEWEST_RUNS} are needed"
            )
        logs = difference([before[s] for s in seeds], [after[s] for s in seeds], paired=True)
        assert logs is not None  # there are enough seeds
        found.append(int(math.copysign(1, logs.mean)) if logs.is_shown else 0)
        low, middle, high = (math.exp(x) for x in (logs.low, logs.mean, logs.high))
        texts.append(f"{name} × {middle:.3g} [{low:.3g}, {high:.3g}]")
        counts.append(len(seeds))
    n = f"n = {counts[0]}" if len(set(counts)) == 1 else f"n = {', '.join(map(str, counts))}"
    return Verdict(claim, _in_words(found, sense), f"{', '.join(texts)} ({n})")


def _values(records: Records, config: Config, wanted: Measuring, value: Callable[[Any], float]) -> dict[int, float]:
    """Logarithms by seed; what is not positive has none."""
    results = {f.run.config.seed: f.answer(wanted) for f in records.seeds_of(config)}
    return {seed: math.log(value(r)) for seed, r in results.items() if r is not None and value(r) > 0}


def _in_words(found: Sequence[int], sense: int) -> str:
    agreeing = sum(each == sense for each in found)
    against = sum(each == -sense for each in found)
    if agreeing == len(found):
        return "holds by all three"
    if against == len(found):
        return "does not hold: the opposite by all three"
    if not any(found):
        return "none of the three shows anything"
    named = [
        f"{name} {'says so' if e == sense else 'the opposite' if e else 'shows nothing'}"
        for name, e in zip(MEASURES, found)
    ]
    return "the three do not agree: " + ", ".join(named)
