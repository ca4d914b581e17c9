"""`smoothout report`: a page from the records of runs."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from smoothout.lab import packs
from smoothout.lab.files import RunError, write_atomically
from smoothout.lab.groups import group_runs
from smoothout.lab.report.page import Page
from smoothout.lab.report.sections import all_sections, provenance, table_sections
from smoothout.lab.runs import Run, find_runs, load_run

HELP = """Write one self-contained page (and the same table as Markdown) from finished runs: no training, no GPU.

Runs that differ in nothing but their seed become one row.
Unfinished runs are left out, and named; those that diverged are counted.
--pack adds the records of all runs to one file of JSON lines, without
weights; such a file is read like a folder.

\b
smoothout report runs/f1
smoothout report runs/plain runs/smooth --out compare.html
smoothout report runs --markdown > results.md
smoothout report runs/c1 --pack results/c1.jsonl
smoothout report results/c1.jsonl --out c1.html --figures figures
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report", help=HELP)(_report)


def _page(file: Path) -> Path:
    if file.suffix.lower() not in ("", ".html", ".htm"):
        mends = {".md": "; --markdown prints the tables", ".jsonl": "; --pack writes records"}.get(file.suffix, "")
        raise ValueError(f"out={str(file)!r}: the page is HTML, give a file that ends in .html{mends}")
    return file


def _report(
    runs: Annotated[list[Path], typer.Argument(help="run folders, folders that hold some, or packs (.jsonl)")],
    out: Annotated[Path, typer.Option(callback=_page, help="the page to write, .html")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="its title")] = "Runs side by side",
    figures: Annotated[Path | None, typer.Option(help="a folder for its pictures, each as an .svg file, too")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="print the tables as Markdown, write no page")] = False,
    pack: Annotated[Path | None, typer.Option(help="add the records to this .jsonl, and write no page")] = None,
) -> None:
    if figures is not None and (markdown or pack is not None):
        raise ValueError(
            f"figures={str(figures)!r}: they are those of a page, which --markdown and --pack do not write"
        )
    with TemporaryDirectory() as folder:
        _write(runs, Path(folder), out, title, figures, markdown, pack)


def _write(
    runs: list[Path], unpacked: Path, out: Path, title: str, figures: Path | None, markdown: bool, pack: Path | None
) -> None:
    found = _load(runs, unpacked)
    if not found:
        raise RunError(f"no run in {', '.join(map(str, runs))}: expected folders that hold a config.json")
    for name, run in found.items():
        if run.record is None and not run.failure:
            done = f"{len(run.metrics)} of {run.config.epochs_trained} epochs"
            print(f"left out: {name} is not finished ({done})", file=sys.stderr)
    groups = group_runs(found.values())
    repeats = sum(run.record is not None for run in found.values()) - sum(len(group.runs) for group in groups)
    if repeats:
        print(
            f"left out: {repeats} repeats of runs that are there; the training that began first counts", file=sys.stderr
        )
    if not any(group.runs for group in groups):
        reason = "every run diverged" if groups else "run their commands again, and they go on"
        raise RunError(f"none of these runs is finished: {reason}")
    if pack is not None:
        ended = [run.path.resolve() for run in found.values() if run.record is not None or run.failure]
        packs.add(pack, ended, Path(os.path.commonpath([path.parent for path in ended])))
        print(pack.resolve())
        return
    if markdown:
        for section in table_sections(groups):
            table = [] if section.table is None else [section.table.to_markdown()]
            print(f"## {section.heading}", *section.paragraphs, *table, sep="\n\n", end="\n\n")
        return
    records = [record for group in groups for record in group.records]
    lead = f"{len(records)} finished runs of {sum(bool(group.runs) for group in groups)} configurations."
    foot = provenance(records, shlex.join(["smoothout", *sys.argv[1:]]))
    page = Page(title, lead, all_sections(groups), foot)
    if figures is not None:
        _write_figures(page, figures.resolve())
    write_atomically(out.resolve(), page.to_html().encode())
    print(out.resolve())


def _write_figures(page: Page, folder: Path) -> None:
    """Named by their section, in its order."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: cannot be a folder of figures ({error.strerror})") from error
    for section in page.sections:
        name = re.sub("[^a-z0-9]+", "-", section.heading.lower()).strip("-")
        for i, figure in enumerate(section.figures, start=1):
            write_atomically(folder / f"{name}-{i}.svg", figure.svg.encode())


def _load(places: list[Path], unpacked: Path) -> dict[str, Run]:
    """Runs by a name that the user knows: their folder, or their pack and their name there."""
    found = {str(path): load_run(path) for path in find_runs(*(p for p in places if p.suffix != ".jsonl"))}
    for i, file in enumerate(p for p in places if p.suffix == ".jsonl"):
        folder = unpacked / str(i)
        with packs.named_by(file, folder):
            found |= {f"{file}, {path.relative_to(folder)}": load_run(path) for path in packs.unpack(file, folder)}
    return found
