"""Records of many runs in one file of JSON lines, for keeping: all of a run folder but weights and checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from smoothout.lab import measurements
from smoothout.lab.files import RunError, read_as
from smoothout.lab.runs import CONFIG, METRICS, PROVENANCE, RESULT

FAILED = "failed.json"  # why a run that diverged has no result
ONE_VALUE = (CONFIG, RESULT, PROVENANCE, FAILED)
_ABSOLUTE_OUT = re.compile(r"--out /[^ \"]+")  # a place on somebody's machine: not for keeping
_OTHER_PLACE = re.compile(r"--(data-root|pack|results|imagenet) /[^ \"]+")


def pack(runs: Iterable[Path], root: Path) -> str:
    """One line a run; metrics column by column, which takes half the room."""
    lines = []
    for run in runs:
        files: dict[str, Any] = {name: _json(run / name) for name in ONE_VALUE if (run / name).exists()}
        with read_as("one line of metrics an epoch", run / METRICS):
            lines_of_epochs = (run / METRICS).read_text().splitlines() if (run / METRICS).exists() else []
            epochs = [json.loads(line) for line in lines_of_epochs]
            columns = {name: [epoch[name] for epoch in epochs] for name in epochs[0]} if epochs else {}
        for path in sorted((run / measurements.FOLDER).glob("*.json")):
            files[f"{measurements.FOLDER}/{path.name}"] = _json(path)
        name = str(run.relative_to(root))
        line = json.dumps({"run": name, "metrics": columns, "files": files}, separators=(",", ":"))
        line = _OTHER_PLACE.sub(lambda place: f"--{place[1]} {place[1].upper()}", line)
        lines.append(_ABSOLUTE_OUT.sub(f"--out {name}", line))
    return "\n".join(lines) + "\n"


def _json(file: Path) -> Any:
    with read_as("JSON", file):
        return json.loads(file.read_text())


def unpack(file: Path, folder: Path) -> list[Path]:
    """Make the run folders of a pack again, below `folder`; gives their paths."""
    made = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            packed = json.loads(line)
            run, columns, files = Path(packed["run"]), packed["metrics"], packed["files"]
        except (ValueError, KeyError) as error:
            raise RunError(f"{file}, line {number}: is not a packed run ({error!r})") from error
        if run.is_absolute() or ".." in run.parts:
            raise RunError(f"{file}, line {number}: the run's name {str(run)!r} leaves the folder")
        for name, value in files.items():
            target = folder / run / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(value, indent=1))
        rows = [dict(zip(columns, row)) for row in zip(*columns.values())]
        (folder / run / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
        made.append(folder / run)
    return made
