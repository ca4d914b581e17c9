"""Table 1's F1 and C1 with BatchNorm's statistics measured anew at the end, each run judged both ways: not the paper's.

Training's own statistics are of the last ten passes and keep some of their noise: how much of a gain or a loss is that?
"""

from __future__ import annotations

from functools import partial

from smoothout.lab.experiments import remeasured
from smoothout.lab.experiments.networks import C1, F1, as_published, configure, label
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.table1 import COMPARED
from smoothout.lab.experiments.vocabulary import Experiment, Row, Setting, Verdict


def batchnorm(setting: Setting) -> Experiment:
    rows = _rows(as_published(setting))
    return Experiment(
        "batchnorm",
        "F1 and C1 with BatchNorm's statistics measured anew at the end",
        rows,
        notes=("Both sides of every comparison are measured anew; Table 1 has the runs as training leaves them.",),
        judge=partial(_judge, rows),
    )


def _rows(setting: Setting) -> tuple[Row, ...]:
    rows = []
    for network in (F1, C1):
        for batch_size in (network.small, network.large):
            of = partial(configure, setting, network, batch_size, remeasure_bn="clean")
            for method in COMPARED:
                versus = None if method == "plain" else of("plain")
                rows.append(Row(label(network, batch_size, method), of(method), versus=versus))
    return tuple(rows)


def _judge(rows: tuple[Row, ...], records: Records) -> tuple[Verdict, ...]:
    return remeasured.verdicts_on({row.label: row.config for row in rows}, records)
