"""The page of experiments, its pictures as files beside it, and the Markdown of `docs/results.md`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from smoothout.lab.config import Config
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import Experiment, Setting
from smoothout.lab.files import write_atomically
from smoothout.lab.groups import each_training_once
from smoothout.lab.report import paper
from smoothout.lab.report.digest import digest
from smoothout.lab.report.page import Page, Section
from smoothout.lab.report.paper_figures import drawn, to_png
from smoothout.lab.report.sections import provenance
from smoothout.lab.runs import Record

Wanted = Sequence[tuple[Setting, Experiment]]

MOST_IN_A_TITLE = 4

LEAD = "Our runs beside those of Wen et al., SmoothOut (2018)."
IN_SHORT = (
    "Last epoch (in preset authors the best one), mean ± standard deviation over n seeds, the change against the "
    "baseline in points with its 95 % interval, in bold where zero is outside. All rows and their sources are below."
)
TINY = (
    "Tiny scale: small networks on the digits. It shows that everything runs; the paper's numbers are no target here."
)


def write_page(out: Path, experiments: Wanted, records: Records, command: str, only_measured: bool = False) -> Path:
    """One page for all, and each picture as PNG beside it; gives the page's path.

    Args:
        only_measured: leave out rows without a record, and tables all of whose rows stand in another.
    """
    of_each = [paper.sections(experiment, setting, records) for setting, experiment in experiments]
    sections = list(chain(*(_measured(experiments, records) if only_measured else of_each)))
    is_tiny = any(setting.scale == "tiny" for setting, _ in experiments)
    presets = sorted({setting.preset for setting, _ in experiments})
    reading = Section("How to read the tables", (*paper.NOTES, *paper.preset_notes(presets)))
    used = records_of(experiments, records)
    foot = provenance(used, command) if used else (("This page", command),)
    lead = f"{LEAD} {TINY}" if is_tiny else LEAD
    names = list(dict.fromkeys(experiment.name for _, experiment in experiments))
    title = "The paper's numbers and ours" + (f": {', '.join(names)}" if len(names) <= MOST_IN_A_TITLE else "")
    out.mkdir(parents=True, exist_ok=True)
    path = (out / "index.html").resolve()
    short = _in_short(experiments, records, used) if only_measured else ()
    write_atomically(path, Page(title, lead, (*short, reading, *sections), foot).to_html().encode())
    for setting, experiment in experiments:
        for i, drawing in enumerate(experiment.drawings):
            draw = drawn(drawing, records)
            if draw is not None:
                write_atomically(path.with_name(f"{experiment.name}-{setting.preset}-{i}.png"), to_png(draw))
    return path


def _in_short(experiments: Wanted, records: Records, used: Sequence[Record]) -> tuple[Section, ...]:
    """Tables 1 and 2 in a few lines, if there are any, and what all runs took."""
    table = digest(experiments, records)
    cost = [f"{told} Below, a run counts in every table that shows it, here once." for told in paper.gpu_time(used)]
    return (Section("In short", (IN_SHORT, *cost), table),) if table.rows else ()


def _measured(experiments: Wanted, records: Records, with_pictures: bool = True) -> list[list[Section]]:
    """Of each experiment the sections that show something new, for presets and tables share many runs.

    New is a picture, a table with a measured run that is in none before it, and verdicts on runs of the preset that
    were not judged yet.
    """
    seen: set[Config] = set()
    judged: dict[str, set[Config]] = defaultdict(set)
    made = []
    for setting, experiment in experiments:
        measured = {row.config for row in experiment.rows if records.seeds_of(row.config)}
        own = {config for config in measured if config.preset == setting.preset}
        shows = not measured <= seen or any(drawn(drawing, records) for drawing in experiment.drawings)
        judges = experiment.judge is not None and not own <= judged[experiment.name]
        if experiment.pools_spread and not any(row.versus and row.config in measured for row in experiment.rows):
            shows = judges = False  # a study in which nothing can be compared yet
        how = {"only_measured": True, "with_table": shows, "with_pictures": with_pictures}
        made.append(paper.sections(experiment, setting, records, **how) if shows or judges else [])
        seen |= measured
        judged[experiment.name] |= measured
    return made


def records_of(experiments: Wanted, records: Records) -> list[Record]:
    """The records behind experiments, each once."""
    groups = {row.config.hash: records.group(row.config) for _, experiment in experiments for row in experiment.rows}
    return each_training_once(record for group in groups.values() if group is not None for record in group.records)


def results_markdown(experiments: Wanted, records: Records, command: str) -> str:
    """The tables of all that has been measured; which have nothing yet is said at the end."""
    used = records_of(experiments, records)
    sections = list(_in_short(experiments, records, used))
    unmeasured: dict[str, list[str]] = {}
    # Pictures are for pages, and the rows of figures stand in tables.
    tables = [(setting, experiment) for setting, experiment in experiments if not experiment.name.startswith("figure")]
    for (setting, experiment), made in zip(tables, _measured(tables, records, with_pictures=False)):
        sections += made
        if not made and not all(records.seeds_of(row.config) for row in experiment.rows):
            unmeasured.setdefault(experiment.title, []).append(setting.preset)
    devices = ", ".join(sorted({record.provenance.device for record in used})) or "none"
    presets = sorted({setting.preset for setting, _ in experiments})
    lead = (
        f"Written by `{command}` from the records in `results/`, {len(used)} runs on {devices}; a test makes it again "
        "and compares. Never edit it by hand.",
        *paper.preset_notes(presets),
    )
    missing = [f"{title} (preset {', '.join(names)})" for title, names in unmeasured.items()]
    return paper.to_markdown(sections, "Results beside the paper's", lead, missing)
