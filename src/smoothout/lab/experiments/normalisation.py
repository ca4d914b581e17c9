"""F1 and C1 with noise on BatchNorm's parameters, too, and there alone; not of the paper.

On ResNet44 the gain of preset authors is not shown without it (`why`): is that so on other networks?
"""

from __future__ import annotations

from functools import partial

from smoothout.lab.experiments.choice import OURS
from smoothout.lab.experiments.networks import C1, F1, Network, as_published, configure, label
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.verdicts import on_difference
from smoothout.lab.experiments.vocabulary import Experiment, Row, Setting, Verdict
from smoothout.lab.groups import reported

PLACES = tuple((network, batch_size) for network in (F1, C1) for batch_size in (network.small, network.large))
WITHOUT: dict[str, bool] = {"perturb_bn": False}
TOO: dict[str, bool] = {"perturb_bn": True}
ALONE: dict[str, bool] = {"perturb_bn": True, "perturb_weights": False}
WHERE = {"normalisation not perturbed": WITHOUT, "normalisation perturbed, too": TOO, "normalisation alone": ALONE}


def normalisation(setting: Setting) -> Experiment:
    setting = as_published(setting)
    rows = []
    for network, batch_size in _places(setting):
        baseline = configure(setting, network, batch_size, "plain")
        rows.append(Row(label(network, batch_size, "plain"), baseline))
        for method in OURS:
            for where, settings in WHERE.items():
                config = configure(setting, network, batch_size, method, **settings)
                rows.append(Row(label(network, batch_size, method, f", {where}"), config, versus=baseline))
    return Experiment(
        "normalisation",
        "F1 and C1 with noise on BatchNorm's parameters",
        tuple(rows),
        judge=partial(_judge, setting),
    )


def _places(setting: Setting) -> list[tuple[Network, int]]:
    """At tiny scale what stands in for F1 has no normalisation layers."""
    return [place for place in PLACES if setting.scale == "paper" or place[0] is not F1]


def _judge(setting: Setting, records: Records) -> tuple[Verdict, ...]:
    verdicts = []
    for network, batch_size in _places(setting):
        for method in OURS:
            of = partial(configure, setting, network, batch_size, method)
            name, everywhere = label(network, batch_size, method), of(**TOO)
            verdicts += [
                on_difference(f"{name} gains by {what}", of(**less), everywhere, records, reported)
                for what, less in (
                    ("noise on normalisation beside that on the other weights", WITHOUT),
                    ("noise on the other weights beside that on normalisation", ALONE),
                )
            ]
    return tuple(verdicts)
