"""Warm-up, strengths, schedules and SAM's radius judged on 5,000 training images held out: `ours` chooses from them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
from smoothout.lab.groups import Group
from smoothout.lab.methods import METHODS

HELD_OUT = 5000
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
USUAL = {"smoothout": 0.0375, "adasmoothout": 0.15, "sam": 0.05}
SCHEDULES = ("linear", "tanh")  # beside the constant one, at once and twice the strength
# ResNet44 runs at the length of its row, where noise has time to pay, so its candidates are fewer, in regimes that were
# tried one after another (docs/log.md):
# - as the text trains: the first updates at 0.4 leave a network that learns nothing for epochs;
# - with warm-up;
# - with it, and BatchNorm measured anew at the end: training's own statistics are of the last ten passes, and under
#   noise they leave the accuracy of an epoch to the luck of ten draws. First on images as they are in the files, then
#   as training cuts and flips them; there noise that falls and noise beside clean gradients are tried too.
# The baseline chooses between the first and the last, and the methods' candidates are of that regime.
DEEP_EPOCHS = 400
DECIDED_BY = 200  # the rate has fallen once, at 162
HALF_WAY = f", {DECIDED_BY} of {DEEP_EPOCHS} epochs"


@dataclass(frozen=True)
class Way:
    """One way to set a method's noise on ResNet44: the strength by the usual one, and the rest."""

    factor: float
    schedule: str = "constant"
    clean_share: float = 0.0
    draws: str = "ghost"
    perturb_bn: bool = False

    def __str__(self) -> str:
        schedule = "" if self.schedule == "constant" else f", {self.schedule}"
        clean = f", {100 * self.clean_share:g} % of ghosts clean" if self.clean_share else ""
        draws = ", one draw a step" if self.draws == "one" else ""
        return f"{schedule}{clean}{draws}{', BatchNorm perturbed' if self.perturb_bn else ''}"

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "strength_schedule": self.schedule,
            "clean_share": self.clean_share,
            "draws": self.draws,
            "perturb_bn": self.perturb_bn,
        }


@dataclass(frozen=True)
class Regime:
    """How ResNet44 is trained, and the ways that were, or are to be, tried there."""

    lr_warmup: float
    remeasure_bn: str
    ways: tuple[Way, ...]

    def __str__(self) -> str:
        warm_up = f"{self.lr_warmup:g} epochs of warm-up" if self.lr_warmup else "no warm-up"
        how = {"no": "", "uncut": ", BatchNorm measured anew on uncut images", "clean": ", BatchNorm measured anew"}
        return f", {warm_up}{how[self.remeasure_bn]}"

    @property
    def settings(self) -> dict[str, Any]:
        return {"lr_warmup": self.lr_warmup, "remeasure_bn": self.remeasure_bn}


AS_THE_TEXT = Regime(
    0.0,
    "no",
    (Way(0.25), Way(0.5), Way(1), Way(1, "linear"), Way(2, "linear"), Way(1, "tanh"), Way(0.5, draws="one")),
)
WARMED_UP = Regime(5.0, "no", (Way(0.25), Way(0.5), Way(1), Way(1, "linear")))
UNCUT = Regime(5.0, "uncut", (Way(1), Way(2), Way(4)))
MEASURED_ANEW = Regime(
    5.0, "clean", (Way(1), Way(2), Way(2, "tanh-falling"), Way(2, clean_share=0.5), Way(4, clean_share=0.5))
)
REGIMES = (AS_THE_TEXT, WARMED_UP, UNCUT, MEASURED_ANEW)
# One run each cannot tell the best few apart, and the highest of many is flattered: they are chosen from once more, by
# the mean of fresh seeds (`reproduce finals`). Half of the epochs do: the order hardly changes afterwards (`reproduce
# lengths`). Two strengths of AdaSmoothOut, each without and with noise on BatchNorm's parameters: without it the gain
# of preset authors is not shown (`reproduce why --preset authors`).
FINALISTS: dict[str, tuple[Way, ...]] = {
    "adasmoothout": tuple(Way(factor, perturb_bn=too) for factor in (2, 1) for too in (False, True)),
}
FINAL_SEEDS = (102, 103, 104)
# Before that, to the end, with one seed more: the strongest of both methods ended below the baseline.
FIRST_ROUND: dict[str, tuple[Way, ...]] = {
    "smoothout": (Way(1), *(Way(factor, clean_share=0.5) for factor in (1.5, 2, 3))),
    "adasmoothout": (Way(2), Way(4, clean_share=0.5)),
}
FIRST_ROUND_SEED = 101
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
    return [_candidate(setting, network, batch_size, method, factor) for factor in FACTORS]


def _candidate(
    setting: Setting,
    network: Network,
    batch_size: int,
    method: str,
    factor: float,
    schedule: str = "constant",
) -> Row:
    """Of a strength by the usual one."""
    strength = USUAL[method] * factor
    told = "" if schedule == "constant" else f", {schedule}"
    return Row(
        label(network, batch_size, method, f", {METHODS[method].symbol} = {strength:g}{told}"),
        held_out(setting, network, batch_size, method, strength=strength, strength_schedule=schedule),
        versus=held_out(setting, network, batch_size, "plain"),
    )


def choice(setting: Setting) -> Experiment:
    setting = replace(setting, preset="ours")  # whichever is asked for: no other chooses
    rows: list[Row] = []
    for (network, batch_size), methods in PLACES.items():
        if network is RESNET44:
            rows += [deep_baseline(setting, regime) for regime in REGIMES]
            rows += [row for each in REGIMES for method in OURS for row in deep_candidates(setting, method, each)]
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
        if method == "plain":
            return [deep_baseline(setting, regime) for regime in (AS_THE_TEXT, MEASURED_ANEW)]
        of_the_baseline = CHOSEN.get((network.model, batch_size, "plain"))
        is_the_texts = of_the_baseline == AS_THE_TEXT.settings
        return deep_candidates(setting, method, AS_THE_TEXT if is_the_texts else MEASURED_ANEW)
    of = partial(_candidate, setting, network, batch_size, method)
    if method == "sam":
        return [of(factor) for factor in RADII]
    return [*robustness_rows(setting, network, batch_size, method), *(of(f, s) for s in SCHEDULES for f in (1.0, 2.0))]


# ---- ResNet44 --------------------------------------------------------------------------------------------------------


def deep_baseline(setting: Setting, regime: Regime, **how: Any) -> Row:
    place = RESNET44, RESNET44.large, "plain"
    return Row(label(*place, str(regime)), held_out(setting, *place, **regime.settings, **how))


def deep_candidates(setting: Setting, method: str, regime: Regime, **how: Any) -> list[Row]:
    """Of a regime's ways; `how` they and their baseline are trained beside it, such as `epochs`."""
    place, of_both = (setting, RESNET44, RESNET44.large), {**regime.settings, **how}
    return [
        Row(
            label(*place[1:], method, f", a = {(strength := USUAL[method] * way.factor):g}{way}{regime}"),
            held_out(*place, method, strength=strength, **way.settings, **of_both),
            versus=held_out(*place, "plain", **of_both),
        )
        for way in regime.ways
    ]


def finalists(setting: Setting, method: str) -> list[Row]:
    rows = deep_candidates(setting, method, replace(MEASURED_ANEW, ways=FINALISTS[method]), stop_after=DECIDED_BY)
    return [of_the_finals(row) for row in rows]


def of_the_finals(row: Row) -> Row:
    """With its seeds, and a label that tells it from a whole run."""
    return replace(row, label=f"{row.label}{HALF_WAY}", seeds=FINAL_SEEDS)


def _by_epoch(setting: Setting) -> tuple[Drawing, ...]:
    """Of the baseline and of both methods at the paper's strength, with warm-up and without."""

    def config(method: str, regime: Regime) -> Config:
        how = {} if method == "plain" else {"strength_schedule": "constant"}
        return held_out(setting, RESNET44, RESNET44.large, method, **regime.settings, **how)

    curves = tuple(
        Curve(f"{METHODS[method].title}{regime}", config(method, regime))
        for method in ("plain", *OURS)
        for regime in (WARMED_UP, AS_THE_TEXT)
    )
    caption = f"ResNet44, CIFAR-10, batch {RESNET44.large}, the paper's strengths, with and without warm-up"
    return (
        Drawing("accuracy by epoch", f"{caption}: accuracy on held-out training images.", curves),
        Drawing("training loss by epoch", f"{caption}: training loss.", curves),
    )


# ---- the best --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """Candidates, and the mean accuracies on held-out images, theirs and the baseline's, over these seeds.

    Where the baseline chooses, it is held against the first candidate, which trains as the text says.
    """

    rows: tuple[Row, ...]
    accuracies: tuple[float, ...]
    baseline: float
    seeds: tuple[int, ...]

    @property
    def best(self) -> Row:
        """The first of equals."""
        return self.rows[self.accuracies.index(self.accuracy)]

    @property
    def accuracy(self) -> float:
        """Of the best."""
        return max(self.accuracies)


def standing(candidates: Sequence[Row], records: Records) -> Standing | None:
    """Over the seeds that all candidates and the baseline have; None if there is no such seed.

    A candidate of which a run diverged is out.
    """
    rows = tuple(row for row in candidates if not records.diverged(row.config))
    baseline = candidates[0].versus or candidates[0].config
    common = records.in_common([baseline, *(row.config for row in rows)])
    if not rows or common is None:
        return None
    groups, seeds = common
    of_baseline, *accuracies = (mean_accuracy(group, seeds) for group in groups)
    return Standing(rows, tuple(accuracies), of_baseline, tuple(sorted(seeds)))


def decided(setting: Setting, network: Network, batch_size: int, method: str, records: Records) -> Standing | None:
    """The candidates that preset `ours` takes the best of: ResNet44's finalists, once those have been tried."""
    if network is RESNET44 and method in FINALISTS:
        found = standing(finalists(setting, method), records)
        if found is not None and set(FINAL_SEEDS) <= set(found.seeds):
            return found
    return standing(candidates(setting, network, batch_size, method), records)


def lacks_choice(config: Config) -> bool:
    """Whether this is a run of preset ours that waits for its place's strength, or its baseline's regime."""
    here = {(network.model, network.dataset, size): methods for (network, size), methods in PLACES.items()}
    choosing = here.get((config.model, config.dataset, config.batch_size), ())
    if config.preset != "ours" or config.hold_out or config.method not in choosing:
        return False
    needed = {"plain", config.method} & set(choosing)
    entries = [CHOSEN.get((config.model, config.batch_size, method)) for method in needed]
    # A method's choice counts only in the regime that it was made in.
    regimes = {(entry.get("lr_warmup"), entry.get("remeasure_bn")) for entry in entries if entry is not None}
    return None in entries or len(regimes) > 1


def what_is_chosen(config: Config) -> dict[str, Any]:
    """The settings of a candidate that preset `ours` takes over."""
    is_deep, is_plain = config.model == RESNET44.model, config.method == "plain"
    names = () if is_plain else ("strength", "strength_schedule", "draws")
    names += ("clean_share", "perturb_bn") if is_deep and not is_plain else ()
    names += ("lr_warmup", "remeasure_bn") if is_deep else ()
    return {name: getattr(config, name) for name in names}


def _judge(setting: Setting, records: Records) -> tuple[Verdict, ...]:
    verdicts = []
    for (network, batch_size), methods in PLACES.items():
        for method in methods:
            claim = f"{label(network, batch_size, method)}: the best of its candidates on held-out images"
            found = decided(setting, network, batch_size, method, records)
            if found is None:
                verdicts.append(Verdict(claim, NOT_MEASURED, ""))
                continue
            chosen = ", ".join(f"{name} {value}" for name, value in what_is_chosen(found.best.config).items())
            other = "as the text trains" if method == "plain" else "of the baseline"
            length = HALF_WAY if found.best.config.stop_after else ""
            accuracies = f"{100 * found.accuracy:.2f} % against {100 * found.baseline:.2f} % {other}"
            evidence = f"{accuracies}, n = {len(found.seeds)}{length}"
            verdicts.append(Verdict(claim, chosen, evidence))
    for regime in (UNCUT, MEASURED_ANEW):
        rows = [deep_baseline(setting, regime), *(r for m in OURS for r in deep_candidates(setting, m, regime))]
        named = {row.label.split(": ", 1)[1].removesuffix(str(regime)): row.config for row in rows}
        verdicts += remeasured.listed(f"ResNet44{regime}", named, records)
    return tuple(verdicts)


def mean_accuracy(group: Group, seeds: Collection[int]) -> float:
    """On the images that it is judged on, after the last epoch."""
    return fmean(run.last.test_accuracy for run in group.records if run.config.seed in seeds)
