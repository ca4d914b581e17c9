"""`smoothout …` in this process. One of its own takes seconds to start; a few tests have that as their point."""

import contextlib
import io
import subprocess
import sys
from unittest import mock

from smoothout.lab.cli import run


def smoothout(*arguments, cwd):
    """As `subprocess.run` would give it, from the folder `cwd`."""
    command = ["smoothout", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), mock.patch.object(sys, "argv", command):
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = run()
            except SystemExit as stop:
                code = stop.code or 0
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())
