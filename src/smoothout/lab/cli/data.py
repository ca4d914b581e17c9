"""`smoothout data`: what is there, fetch, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from smoothout.lab import data as datasets

Root = Annotated[Path | None, typer.Option(help="where data are looked for, and fetched to, first")]

HELP = """List the datasets, fetch them, verify them.

\b
smoothout data
smoothout data fetch cifar10
smoothout data verify mnist --data-root ~/data
"""


def register(app: typer.Typer) -> None:
    """Add the command and its subcommands."""
    group = typer.Typer(help=HELP, rich_markup_mode="rich")

    @group.callback(invoke_without_command=True)
    def data(context: typer.Context, data_root: Root = None) -> None:
        if context.invoked_subcommand is None:
            _list(data_root)
        context.obj = data_root

    @group.command("list", help="List the datasets and where they are. Example: smoothout data list")
    def list_(context: typer.Context, data_root: Root = None) -> None:
        _list(data_root or context.obj)

    @group.command(
        help="Download a dataset and check it; resumes an interrupted download. Example: smoothout data fetch mnist"
    )
    def fetch(context: typer.Context, name: str, data_root: Root = None) -> None:
        print(_fetch(name, data_root or context.obj))

    @group.command(help="Read every file, compare with published checksums. Example: smoothout data verify mnist")
    def verify(context: typer.Context, name: str, data_root: Root = None) -> None:
        _verify(name, data_root or context.obj)

    app.add_typer(group, name="data")


def _list(root: Path | None) -> None:
    for each in datasets.status(root):
        where = "embedded" if each.is_here and each.path is None else str(each.path)
        print(f"{each.name:<12}{where if each.is_here else f'not here: smoothout data fetch {each.name}'}")
    print("looked in " + ", ".join(map(str, datasets.data_roots(root))))


def _fetch(name: str, root: Path | None) -> Path:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    console = Console(stderr=True)  # the path is all that a script reads of it
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def show(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file, total=total)
            bar.update(tasks[file], completed=done, total=total)

        return datasets.fetch(name, root, show)


def _verify(name: str, root: Path | None) -> None:
    found = datasets.verify(name, root)
    print(f"{name}: {found.train_images} training and {found.test_images} test images read without fault"
          + (f", from {found.path}" if found.path else ""))  # fmt: skip
    if found.published:
        print(f"published checksum: {', '.join(found.published)}")
    if found.other:
        print(f"another checksum than the published one: {', '.join(found.other)}")
