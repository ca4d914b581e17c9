"""Every experiment by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from smoothout.lab.experiments.batchnorm import batchnorm
from smoothout.lab.experiments.choice import choice
from smoothout.lab.experiments.claims import claims
from smoothout.lab.experiments.figure1 import figure1
from smoothout.lab.experiments.figure2 import figure2
from smoothout.lab.experiments.figure4 import figure4
from smoothout.lab.experiments.figure5 import figure5
from smoothout.lab.experiments.figure6 import figure6
from smoothout.lab.experiments.figure7 import figure7
from smoothout.lab.experiments.figure8 import figure8
from smoothout.lab.experiments.figure9 import figure9
from smoothout.lab.experiments.finals import finals
from smoothout.lab.experiments.flatness import flatness
from smoothout.lab.experiments.lengths import lengths
from smoothout.lab.experiments.ncopy import ncopy
from smoothout.lab.experiments.normalisation import normalisation
from smoothout.lab.experiments.rates import rates
from smoothout.lab.experiments.rivals import rivals, rivals_choice
from smoothout.lab.experiments.sam import sam
from smoothout.lab.experiments.table1 import table1
from smoothout.lab.experiments.table2 import table2
from smoothout.lab.experiments.table3 import table3
from smoothout.lab.experiments.table4 import table4
from smoothout.lab.experiments.table5 import table5
from smoothout.lab.experiments.vocabulary import Experiment, Setting
from smoothout.lab.experiments.why import why
from smoothout.lab.nearest import nearest

EXPERIMENTS: dict[str, Callable[[Setting], Experiment]] = {
    function.__name__: function
    for function in (
        *(table1, table2, table3, table4, table5),
        *(figure1, figure2, figure4, figure5, figure6, figure7, figure8, figure9),
        *(claims, flatness, ncopy, choice, finals, lengths, why, rates, batchnorm, normalisation, sam),
        *(rivals, rivals_choice),
    )
}
ALL = "all"


def asked_for(names: Iterable[str], setting: Setting, models: Iterable[str] = ()) -> list[Experiment]:
    """The experiments of these names ("all" is every one); with `models`, only their rows of these networks."""
    wanted = list(dict.fromkeys(name for each in names for name in (EXPERIMENTS if each == ALL else [each])))
    for name in wanted:
        if name not in EXPERIMENTS:
            raise ValueError(f"there is no experiment {name!r}{nearest(name, [*EXPERIMENTS, ALL])}")
    experiments = [EXPERIMENTS[name](setting) for name in wanted]
    models = set(models)
    return [_only(each, models) for each in experiments] if models else experiments


def _only(experiment: Experiment, models: set[str]) -> Experiment:
    rows = tuple(row for row in experiment.rows if row.config.model in models)
    lines = tuple(line for line in experiment.lines if line.start.model in models)
    drawings = tuple(
        drawing for drawing in experiment.drawings if all(curve.config.model in models for curve in drawing.curves)
    )
    return replace(experiment, rows=rows, lines=lines, drawings=drawings)
