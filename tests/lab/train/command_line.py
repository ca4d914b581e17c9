"""The real command in a real process."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# One thread: the test machine's cores are shared, and the same bits come out on any of them.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}


def start(*arguments, launcher=(sys.executable, "-m", "smoothout"), **environment):
    """A process of `smoothout …`, its output in pipes."""
    command = [*launcher, *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=HERE,
        env=ENVIRONMENT | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(*arguments, **how):
    """Wait for it: (exit code, stdout, stderr)."""
    with start(*arguments, **how) as process:
        out, err = process.communicate()
    return process.returncode, out, err


def wait_for_line(process, beginning):
    """Read the output up to a line that begins so; AssertionError with all of it if there is none."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(beginning):
            return line
    raise AssertionError(f"no line {beginning!r} in:\n{''.join(lines)}\n{process.stderr.read()}")
