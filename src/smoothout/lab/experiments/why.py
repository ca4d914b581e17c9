"""Why the gain on ResNet44 appears or does not: one factor at a time around the CIFAR-10 row of Table 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from smoothout.lab.config import Config
from smoothout.lab.experiments.choice import USUAL
from smoothout.lab.experiments.networks import RESNET44, label
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.table2 import CIFAR, resnet44
from smoothout.lab.experiments.vocabulary import NOT_MEASURED, Experiment, Row, Setting, Verdict
from smoothout.lab.methods import METHODS
from smoothout.lab.report.groups import Group, compare, reported, sense_of
from smoothout.lab.runs import Record

# Not shorter: in 100 epochs twice the paper's strength costs SmoothOut 3.7 points on held-out images and at 400 nothing
# (n = 1, `lengths`), so a short run would explain another row than this. The centre's runs are those of Table 2.
EPOCHS = CIFAR[0][1]
STUDIED = "adasmoothout"  # the paper's largest gain
BOTH = ("plain", STUDIED)
NOISE = (STUDIED,)
GHOSTS = {"draws": "ghost", "ghost_by": "loop"}
ALL_NOISY: dict[str, Any] = {"clean_share": 0.0}
SCHEDULES = ("constant", "linear", "tanh", "tanh-falling")

# (what is varied, for which methods, settings), by what they tell: an hour of one seed is done in this order.
FACTORS: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("as the preset", BOTH, {}),
    ("learning rate warmed up, 5 epochs", BOTH, {"lr_warmup": 5.0}),
    ("learning rate not warmed up", BOTH, {"lr_warmup": 0.0}),
    ("optimizer reset every epoch", BOTH, {"reset_optimizer_every_epoch": True}),
    ("optimizer never reset", BOTH, {"reset_optimizer_every_epoch": False}),
    ("half of the ghosts clean", NOISE, {**GHOSTS, "clean_share": 0.5}),
    ("all ghosts noisy", NOISE, {**GHOSTS, **ALL_NOISY}),
    *(
        (f"a = {factor:g} × the paper's", NOISE, {"strength": factor * USUAL[STUDIED]})
        for factor in (0.25, 0.5, 1, 2, 4)
    ),
    ("one draw a step", NOISE, {"draws": "one", **ALL_NOISY}),
    ("4 draws a step, each for 4 ghosts", NOISE, {**GHOSTS, **ALL_NOISY, "ghosts_per_draw": 4}),
    ("normalisation perturbed", NOISE, {"perturb_bn": True}),
    ("normalisation not perturbed", NOISE, {"perturb_bn": False}),
    ("weight decay 5e-4", BOTH, {"weight_decay": 5e-4}),
    ("gradient clipped at 5", BOTH, {"clip": 5.0}),
    ("gradient not clipped", BOTH, {"clip": 0.0}),
    *((f"strength {name}", NOISE, {"strength_schedule": name}) for name in SCHEDULES),
    *((f"{epochs} epochs", BOTH, {"epochs": epochs}) for epochs in (100, 200, 800)),
)


class Case(NamedTuple):
    """A factor's run of one method, and the baseline beside it."""

    what: str
    method: str
    config: Config
    baseline: Config


def why(setting: Setting) -> Experiment:
    rows = [
        Row(
            label(RESNET44, RESNET44.large, case.method, f", {case.what}"),
            case.config,
            versus=None if case.method == "plain" else case.baseline,
        )
        for case in _cases(setting)
    ]
    notes = (
        f"{EPOCHS} epochs where no other number is named; each method is compared with the baseline of its row. "
        "Intervals of accuracy are by the deviation over seeds that all rows of one length have together, as if it "
        "were the same in each: with two or three runs a row its own says little.",
        "Every verdict stands for itself: without any effect one in forty would show a gain by chance, which is at "
        "least one in every third study of so many factors.",
    )
    return Experiment(
        "why",
        "ResNet44: which factor makes the gain appear",
        tuple(rows),
        notes=notes,
        compares_costs=True,
        pools_spread=True,
        judge=partial(_judge, setting),
    )


def _cases(setting: Setting) -> list[Case]:
    first: dict[Config, Config] = {}  # of configurations that differ in nothing but their preset, which changes no run

    def trained(method: str, how: dict[str, Any]) -> Config:
        config = resnet44(setting, method, **how)
        return first.setdefault(replace(config, preset=setting.preset), config)

    cases: dict[Config, Case] = {}
    for what, methods, settings in FACTORS:
        baseline = trained("plain", settings if "plain" in methods else {})
        for method in methods:
            config = baseline if method == "plain" else trained(method, settings)
            cases.setdefault(config, Case(what, method, config, baseline))  # else a factor as the preset has it anyway
    return list(cases.values())


# ---- verdicts --------------------------------------------------------------------------------------------------------


def _judge(setting: Setting, records: Records) -> tuple[Verdict, ...]:
    cases = _cases(setting)
    usual, name = cases[0].config, METHODS[STUDIED].title
    study = [group for case in cases if (group := records.group(case.config))]
    weaker = [
        _verdict(f"The baseline is weaker: {case.what}", usual, case.config, records, reported, "weaker", study, -1)
        for case in cases
        if case.method == "plain" and case.config != usual and case.config.epochs == usual.epochs
    ]
    gains = [
        _verdict(f"{name} gains: {case.what}", case.baseline, case.config, records, reported, "gains", study)
        for case in cases
        if case.method != "plain"
    ]
    (central,) = (case for case in cases if case.method != "plain" and case.what == cases[0].what)
    reporting = _verdict(
        f"{name} gains more by reporting the best epoch of the test set than the baseline does",
        central.baseline,
        central.config,
        records,
        lambda record: record.best.test_accuracy - record.last.test_accuracy,
        "holds",
    )
    return (*weaker, reporting, *gains)


def _verdict(
    claim: str,
    before: Config,
    after: Config,
    records: Records,
    value: Callable[[Record], float],
    yes: str,
    study: Sequence[Group] = (),
    signs: int = 1,
) -> Verdict:
    """Of a difference: a word for one in the sense of the claim, none or the opposite; none where a run diverged."""
    lost = records.diverged(before, after)
    if lost:
        return Verdict(claim, f"{lost} runs diverged", "")
    groups = records.group(before), records.group(after)
    if groups[0] is None or groups[1] is None:
        return Verdict(claim, NOT_MEASURED, "")
    found = compare(groups[0], groups[1], value, study)
    more, less = (yes, "the opposite") if signs > 0 else ("the opposite", yes)
    return Verdict(claim, sense_of(found, more, less), "" if found is None else found.in_points())
