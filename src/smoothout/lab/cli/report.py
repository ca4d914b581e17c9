"""`smoothout report`: a page from the records of runs."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from smoothout.lab import packs
from smoothout.lab.report.groups import group_runs
from smoothout.lab.report.page import Page
from smoothout.lab.report.sections import all_sections, provenance
from smoothout.lab.runs import RunError, find_runs, load_run, write_atomically

HELP = """Write one self-contained page (and the same table as Markdown) from finished runs: no training, no GPU.

Runs that differ in nothing but their seed become one row.
Unfinished runs are left out, and named.
--pack keeps the records of all runs in one file of JSON lines, without
weights; such a file is read like a folder.

\b
smoothout report runs/f1
smoothout report runs/plain runs/smooth --out compare.html
smoothout report runs --markdown > results.md
smoothout report runs/c1 --pack results/c1.jsonl
smoothout report results/c1.jsonl --out c1.html
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report", help=HELP)(_report)


def _report(
    runs: Annotated[list[Path], typer.Argument(help="run folders, folders that hold some, or packs (.jsonl)")],
    out: Annotated[Path, typer.Option(help="the page to write")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="its title")] = "Runs side by side",
    markdown: Annotated[bool, typer.Option("--markdown", help="print the tables as Markdown, write no page")] = False,
    pack: Annotated[Path | None, typer.Option(help="write the records into this .jsonl, and no page")] = None,
) -> None:
    with TemporaryDirectory() as folder:
        _write(runs, Path(folder), out, title, markdown, pack)


def _write(runs: list[Path], unpacked: Path, out: Path, title: str, markdown: bool, pack: Path | None) -> None:
    found = [load_run(path) for path in find_runs(*(p for p in runs if p.suffix != ".jsonl"))]
    for i, pack_file in enumerate(runs):
        if pack_file.suffix == ".jsonl":
            with packs.named_by(pack_file, unpacked / str(i)):
                found += [load_run(path) for path in packs.unpack(pack_file, unpacked / str(i))]
    if not found:
        raise RunError(f"no run in {', '.join(map(str, runs))}: expected folders that hold a config.json")
    for run in found:
        if run.record is None:
            print(
                f"left out: {run.path} is not finished ({len(run.metrics)} of {run.config.epochs} epochs)",
                file=sys.stderr,
            )
    groups = group_runs(found)
    repeats = sum(run.record is not None for run in found) - sum(len(group.runs) for group in groups)
    if repeats:
        print(
            f"left out: {repeats} repeats of runs that are there; the training that began first counts", file=sys.stderr
        )
    if not groups:
        raise RunError("none of these runs is finished: run their commands again, and they go on")
    if pack is not None:
        finished = [run.path.resolve() for run in found if run.record is not None]
        root = Path(os.path.commonpath([path.parent for path in finished]))
        write_atomically(pack.resolve(), packs.pack(finished, root).encode())
        print(pack.resolve())
        return
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
