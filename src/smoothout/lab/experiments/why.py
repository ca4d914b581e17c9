"""Why the gain on ResNet44 appears or does not: one factor at a time around the CIFAR-10 row of Table 2."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from smoothout.lab.config import Config
from smoothout.lab.experiments.choice import USUAL
from smoothout.lab.experiments.networks import RESNET44, label
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.table2 import CIFAR, named, resnet44
from smoothout.lab.experiments.verdicts import groups_of, on_contrast, on_difference
from smoothout.lab.experiments.vocabulary import Curve, Drawing, Experiment, Row, Setting, Verdict
from smoothout.lab.groups import difference, sense_of
from smoothout.lab.methods import METHODS
from smoothout.lab.runs import Record, Run

# The row's own length, for in 100 epochs twice the paper's strength costs SmoothOut 3.7 points on held-out images, at
# 400 nothing (n = 1); but only the first half of it, after which the order of runs hardly changes (`lengths` has both).
EPOCHS = CIFAR[0][1]
TO_THE_END: dict[str, Any] = {"stop_after": 0}
CENTRES = {False: "as the preset", True: "as the preset, to the end"}  # the latter is Table 2's
GHOSTS = {"draws": "ghost", "ghost_by": "loop"}
ALL_NOISY: dict[str, Any] = {"clean_share": 0.0}
STRENGTHS = (0.25, 0.5, 1, 2, 4)
SCHEDULES = ("constant", "linear", "tanh", "tanh-falling")


class Factor(NamedTuple):
    """What is varied and how; of the noise: the baseline has no such thing."""

    what: str
    settings: dict[str, Any]
    of_the_noise: bool = False


class Study(NamedTuple):
    """Factors around a preset, of the baseline and of one method beside it."""

    method: str
    factors: tuple[Factor, ...]


def _noise(what: str, **settings: Any) -> Factor:
    return Factor(what, settings, of_the_noise=True)


WITHOUT_NORMALISATION = _noise("normalisation not perturbed", perturb_bn=False)
# Beside its strength, and statistics measured anew at the end, which change a trained network: what those give is known
# without another run.
HOW_OURS_TRAINS_OTHERWISE = (
    Factor("learning rate warmed up, 5 epochs", {"lr_warmup": 5.0}),
    Factor("optimizer never reset", {"reset_optimizer_every_epoch": False}),
    Factor("gradient not clipped", {"clip": 0.0}),
    WITHOUT_NORMALISATION,
)


def _noise_and_length(method: str) -> tuple[Factor, ...]:
    return (
        WITHOUT_NORMALISATION,
        _noise("normalisation perturbed", perturb_bn=True),
        _noise("8 draws a step, one a ghost, and 8 clean ghosts", **GHOSTS, clean_share=0.5),
        _noise("16 draws a step, one a ghost", **GHOSTS, **ALL_NOISY),
        _noise("one draw a step", draws="one", **ALL_NOISY),
        _noise("4 draws a step, one for 4 ghosts", **GHOSTS, **ALL_NOISY, ghosts_per_draw=4),
        *(_noise(f"a = {factor:g} × the paper's", strength=factor * USUAL[method]) for factor in STRENGTHS),
        *(_noise(f"strength {name}, to the end", strength_schedule=name, **TO_THE_END) for name in SCHEDULES),
        Factor("weight decay 5e-4", {"weight_decay": 5e-4}),
        *(Factor(f"half of {epochs} epochs", {"epochs": epochs}) for epochs in (100, 200, 800)),
    )


OF_THE_OTHERS = "smoothout"  # in ours both gain, and SmoothOut's runs spread less


def study_of(setting: Setting) -> Study:
    """Around preset authors, where the paper's gain appears, how ours trains otherwise; else what the noise is like.

    AdaSmoothOut's is the larger gain in preset authors.
    """
    if setting.preset == "authors":
        alone = _noise("normalisation alone perturbed", perturb_bn=True, perturb_weights=False)
        return Study("adasmoothout", (*HOW_OURS_TRAINS_OTHERWISE, alone))
    return Study(OF_THE_OTHERS, _noise_and_length(OF_THE_OTHERS))


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
        "them do, for constant strengths at this length; for other lengths and weight decays that is assumed. "
        "A strength that changes is trained to the end. Each method is compared with the baseline of its row.",
        "Intervals of accuracy are by the deviation over seeds that all rows of one length have together, as if it "
        "were the same in each: with two or three runs a row its own says little. It is not the same, so a difference "
        "is claimed only if the interval by the rows' own deviations excludes zero, too. Verdicts on the best epoch "
        "and on the baseline of preset ours are by these alone.",
        "Verdicts are on the last epoch in every preset. A strength that rises or falls is about half as large on "
        "average as a constant one.",
        "Every verdict stands for itself: without any effect one in forty would show a gain by chance, so of many "
        "factors one may.",
    )
    return Experiment(
        "why",
        "ResNet44: which factor makes the gain appear",
        tuple(rows),
        notes=notes,
        drawings=(_by_what_is_perturbed(setting),),
        compares_costs=True,
        pools_spread=True,
        judge=partial(_judge, setting),
    )


def _cases(setting: Setting) -> list[Case]:
    """Of every factor that the preset has not anyway."""
    first: dict[Config, Config] = {}  # of configurations that differ in nothing but their preset, which changes no run
    study = study_of(setting)

    def trained(method: str, how: dict[str, Any]) -> Config:
        half = how.get("epochs", EPOCHS) // 2
        config = resnet44(setting, method, **{"stop_after": half, **how})
        return first.setdefault(replace(config, preset=setting.preset), config)

    cases: dict[Config, Case] = {}
    centres = (Factor(what, TO_THE_END if to_the_end else {}) for to_the_end, what in CENTRES.items())
    for factor in (*centres, *study.factors):
        length = {name: value for name, value in factor.settings.items() if name in ("epochs", "stop_after")}
        baseline = trained("plain", length if factor.of_the_noise else factor.settings)
        for method, config in (("plain", baseline), (study.method, trained(study.method, factor.settings))):
            cases.setdefault(config, Case(factor.what, method, config, baseline))
    return list(cases.values())


def _by_what_is_perturbed(setting: Setting) -> Drawing:
    """Epochs of the baseline, and of the method with noise here and there."""
    cases = _cases(setting)
    centres = {case.method: case.config for case in cases if case.what == CENTRES[False]}

    def differs_there_alone(case: Case) -> bool:
        centre = centres[case.method]
        there = {"perturb_bn": centre.perturb_bn, "perturb_weights": centre.perturb_weights}
        return replace(case.config, **there) == centre

    shown = [case for case in cases if differs_there_alone(case)]
    curves = tuple(Curve(f"{METHODS[case.method].title}, {case.what}", case.config) for case in shown)
    caption = "ResNet44 on CIFAR-10, by which layers take noise: accuracy on the test set, means over seeds."
    return Drawing("accuracy by epoch", caption, curves)


# ---- verdicts --------------------------------------------------------------------------------------------------------


def _judge(setting: Setting, records: Records) -> tuple[Verdict, ...]:
    cases, (method, _) = _cases(setting), study_of(setting)
    name = METHODS[method].title
    varied = [case for case in cases if case.what not in CENTRES.values()]
    centres = {(case.what, case.method): case.config for case in cases if case not in varied}

    def centre(case: Case, method: str) -> Config:
        return centres[CENTRES[not case.config.stop_after], method]

    every = [group for case in cases if (group := records.group(case.config)) is not None]
    on = partial(on_contrast, records=records, value=_last, study=every)
    baselines = [
        on(f"The baseline without noise changes: {case.what}", [case.config], [usual], more="stronger", less="weaker")
        for case in varied
        if case.method == "plain" and (usual := centre(case, "plain")).epochs == case.config.epochs
    ]
    gains = [
        on(f"{name} gains: {case.what}", [case.config], [case.baseline], more="gains")
        for case in cases
        if case.method == method
    ]
    # That one row shows a gain and another none does not show that they differ.
    changes = [
        on(
            f"{name} gains more than as the preset: {case.what}",
            [case.config, *([] if case.baseline == centre(case, "plain") else [centre(case, "plain")])],
            [centre(case, method), *([] if case.baseline == centre(case, "plain") else [case.baseline])],
        )
        for case in varied
        if case.method == method
    ]
    whole = {each: resnet44(setting, each) for each in CIFAR[0][3]}
    reporting = (
        _reporting(title, whole["plain"], config, records)
        for title, config in named(setting).items()
        if config.method != "plain"
    )
    return (*_against_ours(setting, whole, records), *reporting, *baselines, *gains, *changes)


def _against_ours(setting: Setting, whole: dict[str, Config], records: Records) -> list[Verdict]:
    """Another preset's runs beside a stronger baseline: a gain over a weak one may be none over that."""
    if setting.preset == "ours":
        return []
    stronger = resnet44(replace(setting, preset="ours"), "plain")

    def on(method: str, what: str, more: str, less: str) -> Verdict:
        claim = f"{METHODS[method].title} of preset {setting.preset}, to the end, is {what} the baseline of preset ours"
        return on_difference(claim[0].upper() + claim[1:], stronger, whole[method], records, _last, more, less)

    return [
        on("plain", "weaker than", "the opposite", "holds"),
        *(on(method, "better than", "holds", "the opposite") for method in whole if method != "plain"),
    ]


def _last(record: Record) -> float:
    return record.last.test_accuracy


def _reporting(name: str, baseline: Config, config: Config, records: Records) -> Verdict:
    claim = f"{name} gains more by reporting the best epoch of the test set than the baseline does"
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
