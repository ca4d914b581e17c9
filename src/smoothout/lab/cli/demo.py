"""`smoothout demo`: the main job on embedded data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from smoothout.lab.demo import run_demo
from smoothout.lab.report.page import Section

HELP = """Train on the embedded digits, with and without SmoothOut, and write a page that teaches what flatness is.

Under two minutes on two free cores, no network, no data to fetch.
The last line printed is the path of the page.
The same command again goes on where it was interrupted.

\b
smoothout demo
smoothout demo --seeds 3 --out runs/quick-demo
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo", help=HELP)(_demo)


def _demo(
    out: Annotated[Path, typer.Option(help="folder for the runs and the page")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(help="runs of each kind, at least 3")] = 5,
) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 120  # a file has no edge to wrap at
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def say(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)
            if not console.is_terminal:
                print(f"{done}/{total} {what}", flush=True)

        demo = run_demo(out, seeds, say)
    for section in demo.tables:
        console.print(f"\n[bold]{section.heading}[/]", *section.paragraphs, "", sep="\n", highlight=False)
        console.print(_for_terminal(section))
    print(demo.page)  # alone and unwrapped: others read it


def _for_terminal(section: Section) -> Table:
    """The section's table, without the columns that only the page has room for."""
    table = section.table
    assert table is not None
    kept = [i for i, name in enumerate(table.header) if name not in ("best epoch*", "gradient evaluations", "seconds")]
    styles = {"good": "bold green", "bad": "bold red", "faint": "dim", "": ""}
    shown = Table(box=None, padding=(0, 1))
    for i in kept:
        shown.add_column(table.header[i], justify="left" if i == 0 else "right")
    for row in table.rows:
        shown.add_row(*(Text(row.cells[i].text, styles[row.cells[i].tone]) for i in kept))
    return shown
