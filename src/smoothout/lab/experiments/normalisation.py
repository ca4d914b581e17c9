"""C1 at the large batch with noise on BatchNorm's parameters, too, and there alone; not of the paper.

On ResNet44 the gain of preset authors is not shown without it (`why`): is that so on another network?
"""

from __future__ import annotations

from functools import partial

from smoothout.lab.config import Config
from smoothout.lab.experiments.choice import OURS
from smoothout.lab.experiments.networks import C1, as_published, configure, label
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.verdicts import on_difference
from smoothout.lab.experiments.vocabulary import Experiment, Row, Setting, Verdict
from smoothout.lab.methods import METHODS
from smoothout.lab.report.groups import reported

WHERE: dict[str, dict[str, bool]] = {
    ", normalisation not perturbed": {"perturb_bn": False},
    ", normalisation perturbed, too": {"perturb_bn": True},
    ", normalisation alone perturbed": {"perturb_bn": True, "perturb_weights": False},
}


def normalisation(setting: Setting) -> Experiment:
    setting = as_published(setting)
    baseline = configure(setting, C1, C1.large, "plain")
    rows = [Row(label(C1, C1.large, "plain"), baseline)]
    rows += [
        Row(label(C1, C1.large, method, where), config, versus=baseline)
        for method in OURS
        for where, config in _configs(setting, method).items()
    ]
    return Experiment(
        "normalisation", "C1 with noise on BatchNorm's parameters", tuple(rows), judge=partial(_judge, setting)
    )


def _configs(setting: Setting, method: str) -> dict[str, Config]:
    return {where: configure(setting, C1, C1.large, method, **settings) for where, settings in WHERE.items()}


def _judge(setting: Setting, records: Records) -> tuple[Verdict, ...]:
    verdicts = []
    for method in OURS:
        without, with_it, alone = _configs(setting, method).values()
        name = f"C1, batch {C1.large}: {METHODS[method].title}"
        verdicts += [
            on_difference(f"{name} gains by noise on normalisation, too", without, with_it, records, reported),
            on_difference(f"{name} loses without noise on the rest", alone, with_it, records, reported),
        ]
    return tuple(verdicts)
