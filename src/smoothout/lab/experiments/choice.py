"""Warm-up, strengths, schedules and SAM's radius judged on 5,000 training images held out: `ours` chooses from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from smoothout.lab.config import Config
from smoothout.lab.experiments import remeasured
from smoothout.lab.experiments.chosen import CHOSEN
from smoothout.lab.experiments.networks import C1, F1, RESNET44, Network, configure_as_given, label
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import NOT_MEASURED, Curve, Drawing, Experiment, Row, Setting, Verdict
from smoothout.lab.methods import METHODS
from smoothout.lab.report.groups import Group

HELD_OUT = 5000
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
USUAL = {"smoothout": 0.0375, "adasmoothout": 0.15, "sam": 0.05}
SCHEDULES = ("linear", "tanh")  # beside the constant one, at once and twice the strength
# ResNet44 runs at the length of its row, where noise has time to pay, so its candidates are fewer. Its baseline chooses
# first: whether the learning rate is warmed up, without which the first updates at 0.4 leave a network that learns
# nothing for epochs (docs/log.md, 2026-11-16). The methods' candidates warm up as it does; they were made without
# first, and those that had come out far below the best are not made again. With warm-up the strongest constant noise
# came out best and still left a training loss near 0, so two and four times as much are tried; there, statistics of
# noisy passes begin to cost accuracy, so they are measured anew.
DEEP_EPOCHS = 400
WARM_UPS = (0.0, 5.0)
DEEP_FACTORS = (0.25, 0.5, 1.0)
DEEP_RISING = {0.0: (("linear", 1.0), ("linear", 2.0), ("tanh", 1.0)), 5.0: (("linear", 1.0),)}
REMEASURED_FACTORS = (2.0, 4.0)
REMEASURED = ", BatchNorm measured anew"
RADII = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # of SAM, by the usual one
OURS = ("smoothout", "adasmoothout")
PLACES: dict[tuple[Network, int], tuple[str, ...]] = {
    **dict.fromkeys(((F1, F1.small), (F1, F1.large)), OURS),
    **dict.fromkeys(((C1, C1.small), (C1, C1.large)), (*OURS, "sam")),
    (RESNET44, RESNET44.large): ("plain", *OURS),
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
    return [_candidate(setting, network, batch_size, method, {}, factor) for factor in FACTORS]


def _candidate(
    setting: Setting,
    network: Network,
    batch_size: int,
    method: str,
    regime: Mapping[str, Any],
    factor: float,
    schedule: str = "constant",
    more: str = "",
    **settings: Any,
) -> Row:
    """Of a strength by the usual one; the regime's settings are the baseline's too."""
    strength = USUAL[method] * factor
    told = "" if schedule == "constant" else f", {schedule}"
    settings = {"strength": strength, "strength_schedule": schedule, **settings, **regime}
    return Row(
        label(network, batch_size, method, f", {METHODS[method].symbol} = {strength:g}{told}{more}"),
        held_out(setting, network, batch_size, method, **settings),
        versus=held_out(setting, network, batch_size, "plain", **regime),
    )


def choice(setting: Setting) -> Experiment:
    setting = replace(setting, preset="ours")  # whichever is asked for: no other chooses
    rows: list[Row] = []
    for (network, batch_size), methods in PLACES.items():
        if network is RESNET44:
            rows += deep_baselines(setting)
            rows += [
                row for warm_up in WARM_UPS for method in OURS for row in deep_candidates(setting, method, warm_up)
            ]
            continue
        rows.append(Row(label(network, batch_size, "plain"), held_out(setting, network, batch_size, "plain")))
        for method in methods:
            rows += candidates(setting, network, batch_size, method)
    return Experiment(
        "choice",
        f"Warm-up, strength and schedule, judged on {HELD_OUT:,} held-out training images",
        tuple(rows),
        notes=("Accuracies here are on held-out training images, not on the test set.",),
        drawings=_by_epoch(setting),
        judge=partial(_judge, setting),
    )


def candidates(setting: Setting, network: Network, batch_size: int, method: str) -> list[Row]:
    """What a network, batch size and method choose from."""
    if network is RESNET44:
        return deep_baselines(setting) if method == "plain" else deep_candidates(setting, method, chosen_warm_up())
    of = partial(_candidate, setting, network, batch_size, method, {})
    if method == "sam":
        return [of(factor) for factor in RADII]
    return [*robustness_rows(setting, network, batch_size, method), *(of(f, s) for s in SCHEDULES for f in (1.0, 2.0))]


# ---- ResNet44 --------------------------------------------------------------------------------------------------------


def chosen_warm_up() -> float:
    """That of the baseline; the text's, none, until it has chosen."""
    return CHOSEN.get((RESNET44.model, RESNET44.large, "plain"), {}).get("lr_warmup", WARM_UPS[0])


def deep_baselines(setting: Setting) -> list[Row]:
    place = RESNET44, RESNET44.large, "plain"
    rows = [Row(label(*place, _told(warm_up)), held_out(setting, *place, lr_warmup=warm_up)) for warm_up in WARM_UPS]
    warm_up = WARM_UPS[-1]
    remeasured = held_out(setting, *place, lr_warmup=warm_up, remeasure_bn=True)
    return [*rows, Row(label(*place, REMEASURED + _told(warm_up)), remeasured)]


def deep_candidates(setting: Setting, method: str, warm_up: float, epochs: int = DEEP_EPOCHS) -> list[Row]:
    regime = {"lr_warmup": warm_up, "epochs": epochs}
    of = partial(_candidate, setting, RESNET44, RESNET44.large, method, regime)
    told = _told(warm_up)
    rows = [of(factor, more=told) for factor in DEEP_FACTORS]
    rows += [of(factor, schedule, told) for schedule, factor in DEEP_RISING[warm_up]]
    if not warm_up:
        return [*rows, of(0.5, more=f", one draw a step{told}", draws="one")]
    return [*rows, *(of(factor, more=REMEASURED + told, remeasure_bn=True) for factor in REMEASURED_FACTORS)]


def _told(warm_up: float) -> str:
    return f", {warm_up:g} epochs of warm-up" if warm_up else ", no warm-up"


def _by_epoch(setting: Setting) -> tuple[Drawing, ...]:
    """Of the baseline and of both methods at the paper's strength, with warm-up and without."""

    def config(method: str, warm_up: float) -> Config:
        how = {} if method == "plain" else {"strength_schedule": "constant"}
        return held_out(setting, RESNET44, RESNET44.large, method, lr_warmup=warm_up, **how)

    curves = tuple(
        Curve(METHODS[method].title + _told(warm_up), config(method, warm_up))
        for method in ("plain", *OURS)
        for warm_up in reversed(WARM_UPS)
    )
    caption = f"ResNet44, CIFAR-10, batch {RESNET44.large}, with and without warm-up of the learning rate"
    return (
        Drawing("accuracy by epoch", f"{caption}: accuracy on held-out training images.", curves),
        Drawing("training loss by epoch", f"{caption}: training loss.", curves),
    )


# ---- the best --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Best:
    """A candidate, and the mean accuracies on held-out images, its and the baseline's, over these seeds.

    Where the baseline chooses, it is held against the first candidate, which trains as the text says.
    """

    row: Row
    accuracy: float
    baseline: float
    seeds: tuple[int, ...]


def best(setting: Setting, network: Network, batch_size: int, method: str, records: Records) -> Best | None:
    """The candidate with the highest mean accuracy, the first of equals, over the seeds that all and the baseline have.

    None if there is no such seed. A candidate of which a run diverged is out.
    """
    every = candidates(setting, network, batch_size, method)
    rows = [row for row in every if not any(found.failure for found in records.seeds_of(row.config))]
    baseline = records.group(every[0].versus or every[0].config)
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
    """Whether this is a run of preset ours that waits for its place's strength, or its baseline's warm-up."""
    here = {(network.model, network.dataset, size): methods for (network, size), methods in PLACES.items()}
    choosing = here.get((config.model, config.dataset, config.batch_size), ())
    if config.preset != "ours" or config.hold_out or config.method not in choosing:
        return False
    needed = {"plain", config.method} & set(choosing)
    entries = [CHOSEN.get((config.model, config.batch_size, method)) for method in needed]
    # A method's choice counts only for the warm-up that it was made with.
    return None in entries or len({entry.get("lr_warmup") for entry in entries if entry is not None}) > 1


def what_is_chosen(config: Config) -> dict[str, Any]:
    """The settings of a candidate that preset `ours` takes over."""
    names = () if config.method == "plain" else ("strength", "strength_schedule", "draws")
    if config.model == RESNET44.model:
        names += ("lr_warmup", "remeasure_bn")
    return {name: getattr(config, name) for name in names}


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
            if method != "plain" and "plain" in methods and (network.model, batch_size, "plain") not in CHOSEN:
                chosen += ": for now, since its baseline has not chosen"
            other = "as the text trains" if method == "plain" else "of the baseline"
            evidence = (
                f"{100 * found.accuracy:.2f} % against {100 * found.baseline:.2f} % {other}, n = {len(found.seeds)}"
            )
            verdicts.append(Verdict(claim, chosen, evidence))
    deep = (*deep_baselines(setting), *(row for each in OURS for row in deep_candidates(setting, each, WARM_UPS[-1])))
    measured_anew = {row.label: row.config for row in deep if row.config.remeasure_bn}
    return (*verdicts, *remeasured.verdicts_on(measured_anew, records))


def mean_accuracy(group: Group, seeds: Collection[int]) -> float:
    """On the images that it is judged on, after the last epoch."""
    return fmean(run.last.test_accuracy for run in group.records if run.config.seed in seeds)
