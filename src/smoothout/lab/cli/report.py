"""`smoothout report`: a page from the records of runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from smoothout.lab.report.groups import group_runs
from smoothout.lab.report.page import Page
from smoothout.lab.report.sections import all_sections, provenance
from smoothout.lab.runs import RunError, find_runs, load_run, write_atomically

HELP = """Write one self-contained page (and the same table as Markdown) from finished runs: no training, no GPU.

Runs that differ in nothing but their seed become one row. Unfinished runs are left out, and named.

\b
smoothout report runs/f1
smoothout report runs/plain runs/smooth --out compare.html
smoothout report runs --markdown > results.md
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report", help=HELP)(_report)


def _report(
    runs: Annotated[list[Path], typer.Argument(help="run folders, or folders that hold some")],
    out: Annotated[Path, typer.Option(help="the page to write")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="its title")] = "Runs side by side",
    markdown: Annotated[bool, typer.Option("--markdown", help="print the table as Markdown and write no page")] = False,
) -> None:
    found = [load_run(path) for path in find_runs(*runs)]
    if not found:
        raise RunError(f"no run in {', '.join(map(str, runs))}: expected folders that hold a config.json")
    for run in found:
        if run.record is None:
            print(
                f"left out: {run.path} is not finished ({len(run.metrics)} of {run.config.epochs} epochs)",
                file=sys.stderr,
            )
    groups = group_runs(found)
    if not groups:
        raise RunError("none of these runs is finished: run their commands again, and they go on")
    sections = all_sections(groups)
    if markdown:
        for section in sections:
            if section.table is not None:
                print(f"## {section.heading}", *section.paragraphs, section.table.to_markdown(), sep="\n\n", end="\n\n")
        return
    records = [record for group in groups for record in group.records]
    lead = f"{len(records)} finished runs of {len(groups)} configurations."
    foot = provenance(records, shlex.join(["smoothout", *sys.argv[1:]]))
    page = Page(title, lead, sections, foot)
    write_atomically(out.resolve(), page.to_html().encode())
    print(out.resolve())
