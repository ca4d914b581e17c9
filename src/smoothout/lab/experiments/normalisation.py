"""F1 and C1 with noise on BatchNorm's parameters, too, and there alone; not of the paper.

On ResNet44 the gain of preset authors is not shown without it (`why`): is that so on other networks?
"""

from __future__ import annotations

from functools import partial

from smoothout.lab.config import Config
from smoothout.lab.experiments.choice import OURS
from smoothout.lab.experiments.networks import C1, F1, Network, as_published, configure, label
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.verdicts import on_difference
from smoothout.lab.experiments.vocabulary import Experiment, Row, Setting, Verdict
from smoothout.lab.report.groups import reported

WHERE: dict[str, dict[str, bool]] = {
    ", normalisation not perturbed": {"perturb_bn": False},
    ", normalisation perturbed, too": {"perturb_bn": True},
    ", normalisation alone perturbed": {"perturb_bn": True, "perturb_weights": False},
}


PLACES = tuple((network, batch_size) for network in (F1, C1) for batch_size in (network.small, network.large))


def normalisation(setting: Setting) -> Experiment:
    setting = as_published(setting)
    rows = []
    for network, batch_size in PLACES:
        baseline = configure(setting, network, batch_size, "plain")
        rows.append(Row(label(network, batch_size, "plain"), baseline))
        rows += [
            Row(label(network, batch_size, method, where), config, versus=baseline)
            for method in OURS
            for where, config in _configs(setting, network, batch_size, method).items()
        ]
    return Experiment(
        "normalisation",
        "F1 and C1 with noise on BatchNorm's parameters",
        tuple(rows),
        judge=partial(_judge, setting),
    )


def _configs(setting: Setting, network: Network, batch_size: int, method: str) -> dict[str, Config]:
    return {where: configure(setting, network, batch_size, method, **settings) for where, settings in WHERE.items()}


def _judge(setting: Setting, records: Records) -> tuple[Verdict, ...]:
    verdicts = []
    for network, batch_size in PLACES:
        for method in OURS:
            without, with_it, alone = _configs(setting, network, batch_size, method).values()
            name = label(network, batch_size, method)
            verdicts += [
                on_difference(f"{name} gains by noise on normalisation, too", without, with_it, records, reported),
                on_difference(f"{name} gains by noise on the rest, too", alone, with_it, records, reported),
            ]
    return tuple(verdicts)
