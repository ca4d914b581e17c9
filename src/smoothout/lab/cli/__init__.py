"""The commands. Thin: parse, call, print. A command is a file with `register(app)`, named in COMMANDS."""

from __future__ import annotations

import os
import platform
import sys
import traceback
from typing import Annotated

import torch
import typer

import smoothout
from smoothout.lab.cli import data, demo, doctor, measure, report, reproduce, train
from smoothout.lab.data import DataError
from smoothout.lab.files import RunError
from smoothout.lab.train.processes import speaks_for_all
from smoothout.lab.train.stop import Interrupted

COMMANDS = (demo, train, measure, reproduce, report, data, doctor)

# What a user can cause and mend: said in one message. Anything else is a fault of ours and keeps its traceback.
EXPECTED = (RunError, DataError, ValueError, OSError, torch.OutOfMemoryError)

# \b keeps the lines that follow as they are.
HELP = """Flat-minima training: train, compare and reproduce SmoothOut (Wen et al., 2018).

\b
smoothout demo
smoothout train --dataset digits --epochs 20 --out runs/first
smoothout measure sharpness runs/first
smoothout report runs --out report.html
smoothout COMMAND --help
"""

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"smoothout {smoothout.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def _smoothout(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print versions and stop")
    ] = False,
) -> None:
    """Keeps the name of a command necessary, however many commands there are."""


for command in COMMANDS:
    command.register(app)


def run() -> int:
    """Run the command line and give the exit code; an error is one message on stderr, from the first process only."""
    try:
        app(prog_name="smoothout")
    except Interrupted as stop:
        _say(str(stop))
        return stop.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except EXPECTED as error:
        if os.environ.get("SMOOTHOUT_TRACEBACK"):
            traceback.print_exc()
        _say(f"error: {error}")
        return 1
    return 0


def _say(text: str) -> None:
    if speaks_for_all():
        print(text, file=sys.stderr, flush=True)
