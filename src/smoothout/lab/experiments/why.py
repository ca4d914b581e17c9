"""Why the gain on ResNet44 appears or does not: one factor at a time around the CIFAR-10 row of Table 2."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from smoothout.lab.config import Config
from smoothout.lab.experiments.choice import USUAL
from smoothout.lab.experiments.networks import RESNET44, label
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.table2 import CIFAR, resnet44
from smoothout.lab.experiments.verdicts import groups_of, on_contrast
from smoothout.lab.experiments.vocabulary import Experiment, Row, Setting, Verdict
from smoothout.lab.methods import METHODS
from smoothout.lab.report.groups import difference, sense_of
from smoothout.lab.runs import Record, Run

# The row's own length, for in 100 epochs twice the paper's strength costs SmoothOut 3.7 points on held-out images, at
# 400 nothing (n = 1); but only the first half of it, after which the order of runs hardly changes (`lengths` has both).
EPOCHS = CIFAR[0][1]
TO_THE_END: dict[str, Any] = {"stop_after": 0}
# Both gain on the test set (Table 2, preset ours), where its runs spread by 0.11 points, the other's by 0.23 (n = 5).
STUDIED = "smoothout"
NAME = METHODS[STUDIED].title
BOTH = ("plain", STUDIED)
NOISE = (STUDIED,)
GHOSTS = {"draws": "ghost", "ghost_by": "loop"}
ALL_NOISY: dict[str, Any] = {"clean_share": 0.0}
CENTRES = {False: "as the preset", True: "as the preset, to the end"}  # the latter is Table 2's
SCHEDULES = ("constant", "linear", "tanh", "tanh-falling")

# (what is varied, for which methods, settings). What is as the preset has it anyway is left out.
FACTORS: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    *((what, BOTH, TO_THE_END if to_the_end else {}) for to_the_end, what in CENTRES.items()),
    ("learning rate warmed up, 5 epochs", BOTH, {"lr_warmup": 5.0}),
    ("learning rate not warmed up", BOTH, {"lr_warmup": 0.0}),
    ("optimizer reset every epoch", BOTH, {"reset_optimizer_every_epoch": True}),
    ("optimizer never reset", BOTH, {"reset_optimizer_every_epoch": False}),
    ("8 draws a step, one a ghost, and 8 clean ghosts", NOISE, {**GHOSTS, "clean_share": 0.5}),
    ("16 draws a step, one a ghost", NOISE, {**GHOSTS, **ALL_NOISY}),
    *(
        (f"a = {factor:g} × the paper's", NOISE, {"strength": factor * USUAL[STUDIED]})
        for factor in (0.25, 0.5, 1, 2, 4)
    ),
    ("one draw a step", NOISE, {"draws": "one", **ALL_NOISY}),
    ("4 draws a step, one for 4 ghosts", NOISE, {**GHOSTS, **ALL_NOISY, "ghosts_per_draw": 4}),
    ("normalisation perturbed", NOISE, {"perturb_bn": True}),
    ("normalisation not perturbed", NOISE, {"perturb_bn": False}),
    ("weight decay 5e-4", BOTH, {"weight_decay": 5e-4}),
    ("gradient clipped at 5", BOTH, {"clip": 5.0}),
    ("gradient not clipped", BOTH, {"clip": 0.0}),
    *((f"strength {name}, to the end", NOISE, {"strength_schedule": name, **TO_THE_END}) for name in SCHEDULES),
    *((f"half of {epochs} epochs", BOTH, {"epochs": epochs}) for epochs in (100, 200, 800)),
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
        f"The first half of {EPOCHS} epochs where nothing else is named. `lengths` shows that it ranks runs as all of "
        "them do, for constant strengths at this length; for other lengths, weight decay and clipping that is assumed. "
        "A strength that changes is trained to the end. Each method is compared with the baseline of its row.",
        "Intervals of accuracy are by the deviation over seeds that all rows of one length have together, as if it "
        "were the same in each: with two or three runs a row its own says little. It is not the same, so a difference "
        "is claimed only if the interval by the rows' own deviations excludes zero, too.",
        "Verdicts are on the last epoch in every preset. A strength that rises or falls is about half as large on "
        "average as a constant one.",
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
        half = how.get("epochs", EPOCHS) // 2
        config = resnet44(setting, method, **{"stop_after": half, **how})
        return first.setdefault(replace(config, preset=setting.preset), config)

    cases: dict[Config, Case] = {}
    for what, methods, settings in FACTORS:
        length = {name: settings[name] for name in ("epochs", "stop_after") if name in settings}
        baseline = trained("plain", settings if "plain" in methods else length)
        for method in methods:
            config = baseline if method == "plain" else trained(method, settings)
            cases.setdefault(config, Case(what, method, config, baseline))  # else a factor as the preset has it anyway
    return list(cases.values())


# ---- verdicts --------------------------------------------------------------------------------------------------------


def _judge(setting: Setting, records: Records) -> tuple[Verdict, ...]:
    cases = _cases(setting)
    varied = [case for case in cases if case.what not in CENTRES.values()]
    centres = {(case.what, case.method): case.config for case in cases if case not in varied}

    def centre(case: Case, method: str) -> Config:
        return centres[CENTRES[not case.config.stop_after], method]

    study = [group for case in cases if (group := records.group(case.config)) is not None]
    on = partial(on_contrast, records=records, value=_last, study=study)
    weaker = [
        on(f"The baseline is weaker: {case.what}", [case.config], [usual], more="the opposite", less="weaker")
        for case in varied
        if case.method == "plain" and (usual := centre(case, "plain")).epochs == case.config.epochs
    ]
    gains = [
        on(f"{NAME} gains: {case.what}", [case.config], [case.baseline], more="gains")
        for case in cases
        if case.method == STUDIED
    ]
    # That one row shows a gain and another none does not show that they differ.
    changes = [
        on(
            f"{NAME} gains more than as the preset: {case.what}",
            [case.config, *([] if case.baseline == centre(case, "plain") else [centre(case, "plain")])],
            [centre(case, STUDIED), *([] if case.baseline == centre(case, "plain") else [case.baseline])],
        )
        for case in varied
        if case.method == STUDIED
    ]
    baseline, studied = (centres[CENTRES[True], method] for method in BOTH)
    return (*weaker, _reporting(baseline, studied, records), *gains, *changes)


def _last(record: Record) -> float:
    return record.last.test_accuracy


def _reporting(baseline: Config, config: Config, records: Records) -> Verdict:
    claim = f"{NAME} gains more by reporting the best epoch of the test set than the baseline does"
    groups = groups_of((baseline, config), records)
    if isinstance(groups, str):
        return Verdict(claim, groups, "")
    found = difference(*([_flattery(run) for run in group.runs] for group in groups), paired=False)
    return Verdict(claim, sense_of(found), "" if found is None else found.in_points())


def _flattery(run: Run) -> float:
    """Of the best epoch, all as training left them: the last may have been judged again with other statistics."""
    assert run.record is not None
    again = run.record.as_trained
    last = run.record.last.test_accuracy if again is None else again["test_accuracy"]
    return max([last, *(metrics.test_accuracy for metrics in run.metrics[:-1])]) - last
