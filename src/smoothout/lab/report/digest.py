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

TABLES = ("table1", "table2", "rates")
COMPARED = ("smoothout", "adasmoothout")


def digest(experiments: Sequence[tuple[Setting, Experiment]], records: Records) -> Table:
    """What has been measured of Tables 1 and 2 and at rates of their own, with the change against the baseline.

    Lines with too few runs to claim anything are left out, and those that repeat the runs of another preset.
    """
    rows, seen = [], set()
    for setting, experiment in experiments:
        if experiment.name not in TABLES:
            continue
        for base in (row for row in experiment.rows if row.versus is None and not row.note and not row.config.hold_out):
            compared = [row for row in experiment.rows if row.versus == base.config]
            runs = (base.config, *(row.config for row in compared))
            if runs not in seen and len(records.seeds_of(base.config)) >= FEWEST_RUNS:
                rows += [_line(base, line, setting, records) for line in _lines(compared)]
            seen.add(runs)
    titles = tuple(METHODS[name].title for name in COMPARED)
    return Table(("accuracy on the test set", "n", "baseline", *titles), tuple(row for row in rows if row is not None))


def _lines(compared: Sequence[Row]) -> list[list[Row]]:
    """Each method once in a line: what was chosen before stands below what is chosen now."""
    lines: list[list[Row]] = [[]]
    for row in compared:
        if row.config.method in (there.config.method for there in lines[-1]):
            lines.append([])
        lines[-1].append(row)
    return lines


def _line(base: Row, rows: Sequence[Row], setting: Setting, records: Records) -> page.Row | None:
    group = records.group(base.config)
    if group is None:
        return None
    configs = {row.config.method: row.config for row in rows}
    others = {method: records.group(config) for method, config in configs.items()}
    cells = [
        _cell(group, others[method], records.diverged(configs[method]), is_whole=not records.diverged(base.config))
        if method in configs
        else Cell("–")
        for method in COMPARED
    ]
    first = rows[0] if rows else base
    which = " (best epoch)" if base.config.report == "best" else ""
    name = first.label.replace(": " + METHODS[first.config.method].title, "") + f", preset {setting.preset}{which}"
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
