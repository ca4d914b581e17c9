"""The paper's main tables in a few lines, for README and docs: a line a network and batch size, a column a method."""

from __future__ import annotations

from collections.abc import Sequence

from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import Experiment, Row, Setting
from smoothout.lab.groups import FEWEST_RUNS, Group, compare, reported
from smoothout.lab.methods import METHODS
from smoothout.lab.report import page
from smoothout.lab.report.page import Cell, Table
from smoothout.lab.report.sections import percent

TABLES = ("table1", "table2")
COMPARED = ("smoothout", "adasmoothout")


def digest(experiments: Sequence[tuple[Setting, Experiment]], records: Records) -> Table:
    """What has been measured of Tables 1 and 2, with the change against the baseline.

    Without lines of too few runs to claim anything, and without those that are another preset's runs.
    """
    rows, seen = [], set()
    for setting, experiment in experiments:
        if experiment.name not in TABLES:
            continue
        for base in (row for row in experiment.rows if row.versus is None and not row.note):
            runs = (base.config, *(row.config for row in experiment.rows if row.versus == base.config))
            if runs not in seen and len(records.seeds_of(base.config)) >= FEWEST_RUNS:
                rows.append(_line(base, experiment, setting, records))
            seen.add(runs)
    titles = tuple(METHODS[name].title for name in COMPARED)
    return Table(("accuracy on the test set", "n", "baseline", *titles), tuple(row for row in rows if row is not None))


def _line(base: Row, experiment: Experiment, setting: Setting, records: Records) -> page.Row | None:
    group = records.group(base.config)
    if group is None:
        return None
    rows: dict[str, Row] = {}
    for row in experiment.rows:
        if row.versus == base.config:
            rows.setdefault(row.config.method, row)  # the first: what was chosen before comes after it
    others = {method: records.group(row.config) for method, row in rows.items()}
    diverged = {method: records.diverged(row.config) for method, row in rows.items()}
    which = " (best epoch)" if base.config.report == "best" else ""
    name = base.label.replace(": " + METHODS["plain"].title, "") + f", preset {setting.preset}{which}"
    is_whole = not records.diverged(base.config)
    cells = [_cell(group, others.get(method), diverged.get(method, 0), is_whole) for method in COMPARED]
    counts = {len(each.records) for each in (group, *others.values()) if each is not None}
    n = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    return page.Row((Cell(name), Cell(n), Cell(percent(group.sample(reported))), *cells))


def _cell(base: Group, group: Group | None, diverged: int, is_whole: bool) -> Cell:
    """Nothing is claimed against a baseline of which runs diverged, no gain of a method of which some did."""
    lost = f", {diverged} more diverged" if diverged else ""
    if group is None:
        return Cell(f"{diverged} runs diverged" if diverged else "–")
    effect = compare(base, group, reported)
    accuracy = percent(group.sample(reported))
    if effect is None:
        return Cell(f"{accuracy} (too few runs){lost}")
    change = f"{100 * effect.mean:+.2f} [{100 * effect.low:+.2f}, {100 * effect.high:+.2f}]"
    is_claimed = effect.is_shown and is_whole and not (diverged and effect.mean > 0)
    return Cell(f"{accuracy}: {change}{lost}", ("good" if effect.mean > 0 else "bad") if is_claimed else "")
