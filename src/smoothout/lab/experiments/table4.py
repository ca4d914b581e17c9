"""Table 4: without de-noising at strengths tuned for it."""

from __future__ import annotations

from functools import partial

from smoothout.lab.config import Config
from smoothout.lab.experiments.networks import RESNET44, as_published, label
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.table2 import resnet44
from smoothout.lab.experiments.table3 import noise_left
from smoothout.lab.experiments.verdicts import on_difference
from smoothout.lab.experiments.vocabulary import Experiment, Row, Setting, Verdict
from smoothout.lab.groups import reported
from smoothout.lab.methods import METHODS


def table4(setting: Setting) -> Experiment:
    setting = as_published(setting)
    baseline = resnet44(setting, "plain")
    smooth, ada = resnet44(setting, "smoothout"), resnet44(setting, "adasmoothout")

    def row(method: str, more: str, config: Config, accuracy: float) -> Row:
        versus = None if config == baseline else baseline
        return Row(label(RESNET44, RESNET44.large, method, more), config, accuracy, versus=versus)

    left = resnet44(setting, "smoothout", strength=1e-4, **noise_left(setting))
    ada_left = resnet44(setting, "adasmoothout", strength=7.5e-4, **noise_left(setting))
    return Experiment(
        "table4",
        "Table 4: with and without de-noising, strengths tuned",
        (
            row("plain", "", baseline, 91.02),
            row("smoothout", "", smooth, 91.95),
            row("smoothout", " without de-noising, a = 1e-4", left, 91.15),
            row("adasmoothout", "", ada, 92.63),
            row("adasmoothout", " without de-noising, a = 7.5e-4", ada_left, 91.54),
        ),
        judge=partial(_judge, ((ada_left, ada), (left, smooth))),
    )


def _judge(pairs: tuple[tuple[Config, Config], ...], records: Records) -> tuple[Verdict, ...]:
    """What the paper reads from the table: rows against each other, not against the baseline."""
    return tuple(
        on_difference(
            f"{METHODS[after.method].title} with de-noising is better than without", before, after, records, reported
        )
        for before, after in pairs
    )
