"""Strengths, schedules and SAM's radius judged on 5,000 training images held out: what preset `ours` chooses from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from smoothout.lab.config import Config
from smoothout.lab.experiments.chosen import CHOSEN
from smoothout.lab.experiments.networks import C1, F1, RESNET44, Network, configure_as_given, label
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import NOT_MEASURED, Experiment, Row, Setting, Verdict
from smoothout.lab.methods import METHODS
from smoothout.lab.report.groups import Group

HELD_OUT = 5000
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
USUAL = {"smoothout": 0.0375, "adasmoothout": 0.15, "sam": 0.05}
SCHEDULES = ("linear", "tanh")  # beside the constant one, at once and twice the strength
# ResNet44 runs at the length of its row, where noise has time to pay, so its candidates are fewer. They began as more
# rising ones; those of SmoothOut came out below the constant ones (docs/log.md, 2026-11-16).
DEEP_EPOCHS = 400
DEEP_FACTORS = (0.25, 0.5, 1.0)
DEEP_RISING = (("linear", 1.0), ("linear", 2.0), ("tanh", 1.0))
RADII = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # of SAM, by the usual one
OURS = ("smoothout", "adasmoothout")
PLACES: dict[tuple[Network, int], tuple[str, ...]] = {
    **dict.fromkeys(((F1, F1.small), (F1, F1.large)), OURS),
    **dict.fromkeys(((C1, C1.small), (C1, C1.large)), (*OURS, "sam")),
    (RESNET44, RESNET44.large): OURS,
}


def held_out(setting: Setting, network: Network, batch_size: int, method: str, **settings: Any) -> Config:
    """A run judged on held-out training images; whatever was chosen before does not count."""
    if method in USUAL:
        settings = {"strength": USUAL[method], **settings}
    if network is RESNET44:
        settings = {"epochs": DEEP_EPOCHS, **settings}
    return configure_as_given(setting, network, batch_size, method, hold_out=HELD_OUT, **settings)


def robustness_rows(setting: Setting, network: Network, batch_size: int, method: str) -> list[Row]:
    """a × ¼ … × 4, constant."""
    return [_candidate(setting, network, batch_size, method, factor) for factor in FACTORS]


def _candidate(
    setting: Setting,
    network: Network,
    batch_size: int,
    method: str,
    factor: float,
    schedule: str = "constant",
    more: str = "",
    epochs: int | None = None,
    **settings: Any,
) -> Row:
    length = {} if epochs is None else {"epochs": epochs}
    strength = USUAL[method] * factor
    told = "" if schedule == "constant" else f", {schedule}"
    settings = {"strength": strength, "strength_schedule": schedule, **settings, **length}
    return Row(
        label(network, batch_size, method, f", {METHODS[method].symbol} = {strength:g}{told}{more}"),
        held_out(setting, network, batch_size, method, **settings),
        versus=held_out(setting, network, batch_size, "plain", **length),
    )


def choice(setting: Setting) -> Experiment:
    setting = replace(setting, preset="ours")  # whichever is asked for: no other chooses
    rows: list[Row] = []
    for (network, batch_size), methods in PLACES.items():
        baseline = held_out(setting, network, batch_size, "plain")
        rows.append(Row(label(network, batch_size, "plain"), baseline))
        for method in methods:
            rows += candidates(setting, network, batch_size, method)
    return Experiment(
        "choice",
        f"Strength and schedule, judged on {HELD_OUT:,} held-out training images",
        tuple(rows),
        notes=("Accuracies here are on held-out training images, not on the test set.",),
        judge=partial(_judge, setting),
    )


def candidates(
    setting: Setting, network: Network, batch_size: int, method: str, epochs: int | None = None
) -> list[Row]:
    """What a network, batch size and method choose from; epochs where they are not the network's."""
    of = partial(_candidate, setting, network, batch_size, method, epochs=epochs)
    if method == "sam":
        return [of(factor) for factor in RADII]
    if network is RESNET44:
        rising = [of(factor, schedule) for schedule, factor in DEEP_RISING]
        one_draw = of(0.5, more=", one draw a step", draws="one")
        return [*(of(factor) for factor in DEEP_FACTORS), *rising, one_draw]
    return [*robustness_rows(setting, network, batch_size, method), *(of(f, s) for s in SCHEDULES for f in (1.0, 2.0))]


@dataclass(frozen=True)
class Best:
    """A candidate, and the mean accuracies on held-out images, its and the baseline's, over these seeds."""

    row: Row
    accuracy: float
    baseline: float
    seeds: tuple[int, ...]


def best(setting: Setting, network: Network, batch_size: int, method: str, records: Records) -> Best | None:
    """The candidate with the highest mean accuracy, the first of equals, over the seeds that all and the baseline have.

    None if there is no such seed. A candidate of which a run diverged is out.
    """
    rows = [
        row
        for row in candidates(setting, network, batch_size, method)
        if not any(found.failure for found in records.seeds_of(row.config))
    ]
    baseline = records.group(held_out(setting, network, batch_size, "plain"))
    groups = [records.group(row.config) for row in rows]
    known = [group for group in (baseline, *groups) if group is not None]
    if baseline is None or len(known) <= len(rows):
        return None
    seeds = tuple(sorted(set.intersection(*(set(group.seeds) for group in known))))
    if not rows or not seeds:
        return None
    of_baseline, *accuracies = (mean_accuracy(group, seeds) for group in known)
    highest = max(accuracies)
    return Best(rows[accuracies.index(highest)], highest, of_baseline, seeds)


def lacks_choice(config: Config) -> bool:
    """Whether this is a run of preset ours that waits for its place's strength to be chosen."""
    here = {
        (network.model, network.dataset, batch_size, method)
        for (network, batch_size), methods in PLACES.items()
        for method in methods
    }
    is_one = (config.model, config.dataset, config.batch_size, config.method) in here
    chosen = (config.model, config.batch_size, config.method) in CHOSEN
    return config.preset == "ours" and not config.hold_out and is_one and not chosen


def what_is_chosen(config: Config) -> dict[str, Any]:
    """The settings of a candidate that preset `ours` takes over."""
    return {name: getattr(config, name) for name in ("strength", "strength_schedule", "draws")}


def _judge(setting: Setting, records: Records) -> tuple[Verdict, ...]:
    verdicts = []
    for (network, batch_size), methods in PLACES.items():
        for method in methods:
            claim = f"{label(network, batch_size, method)}: the best of its candidates on held-out images"
            found = best(setting, network, batch_size, method, records)
            if found is None:
                verdicts.append(Verdict(claim, NOT_MEASURED, ""))
                continue
            chosen = ", ".join(f"{name} {value}" for name, value in what_is_chosen(found.row.config).items())
            evidence = (
                f"{100 * found.accuracy:.2f} % against {100 * found.baseline:.2f} % of the baseline, "
                f"n = {len(found.seeds)}"
            )
            verdicts.append(Verdict(claim, chosen, evidence))
    return tuple(verdicts)


def mean_accuracy(group: Group, seeds: Collection[int]) -> float:
    """On the images that it is judged on, after the last epoch."""
    return fmean(run.last.test_accuracy for run in group.records if run.config.seed in seeds)
