"""`smoothout demo`: the main job on embedded data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from smoothout.lab.demo import run_demo
from smoothout.lab.report.page import Table as Results

HELP = """Train on the embedded digits, with and without SmoothOut, and write a page that teaches what flatness is.

Under two minutes on two cores, no network, no data to fetch. The last line printed is the path of the page. The same
command again goes on where it was interrupted.

\b
smoothout demo
smoothout demo --seeds 3 --out runs/quick-demo
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo", help=HELP)(_demo)


def _demo(
    out: Annotated[Path, typer.Option(help="folder for the runs and the page")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=2, help="runs of each kind")] = 5,
) -> None:
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def say(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)
            if not console.is_terminal:
                print(f"{done}/{total} {what}", flush=True)

        page, table, sentences = run_demo(out, seeds, say)
    console.print(_for_terminal(table))
    for sentence in sentences:
        print(sentence)
    print(page)  # alone and unwrapped: others read it


def _for_terminal(table: Results) -> Table:
    shown = Table(*table.header, box=None, padding=(0, 1))
    for row in table.rows:
        shown.add_row(*row.cells, end_section=False)
    return shown
