"""Records of many runs in one file of JSON lines, for keeping: all of a run folder but weights and checkpoints."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smoothout.lab import measurements
from smoothout.lab.files import RunError, read_as, write_atomically
from smoothout.lab.runs import CONFIG, FAILED, METRICS, PROVENANCE, RESULT

ONE_VALUE = (CONFIG, RESULT, PROVENANCE, FAILED)
_NAMING_PLACES = "out|data-root|pack|results|imagenet|config"
# A place on somebody's machine, as a shell is told of it: not for keeping.
_PLACE = re.compile(rf"'--({_NAMING_PLACES})=/[^']*'|--({_NAMING_PLACES})[ =](?:'/[^']*'|/[^ \"]+)")


def add(file: Path, runs: Iterable[Path], root: Path) -> None:
    """Keep the records of runs in a file, beside those that are there; of one training the line with most files."""
    there = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    lines: dict[tuple[str, str | None], str] = {}
    with read_as("a pack of runs", file):
        for line in (*there, *pack(runs, root).splitlines()):
            files = json.loads(line)["files"]
            began = files.get(PROVENANCE, {}).get("starts", [{}])[0].get("started")
            key = files[CONFIG]["hash"], began
            if key not in lines or len(files) >= len(json.loads(lines[key])["files"]):
                lines[key] = line
    file.resolve().parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file.resolve(), "".join(f"{line}\n" for line in lines.values()).encode())


def refuse_damaged(file: Path) -> None:
    """Now rather than after hours of training."""
    with read_as("a pack of runs", file):
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
            json.loads(line)["files"][CONFIG]["hash"]
    file.resolve().parent.mkdir(parents=True, exist_ok=True)
    if not os.access(file.resolve().parent, os.W_OK):
        raise ValueError(f"--pack: {file.resolve().parent} cannot be written to")


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
        lines.append(_without_places(line, name))
    return "\n".join(lines) + "\n"


def _without_places(line: str, run: str) -> str:
    """A packed line without places of this machine: `--out` names the run, any other option itself, in capitals."""

    def named(place: re.Match[str]) -> str:
        option = place[1] or place[2]
        return f"--{option} {json.dumps(run)[1:-1] if option == 'out' else option.upper()}"

    return _PLACE.sub(named, line)


def _json(file: Path) -> Any:
    with read_as("JSON", file):
        return json.loads(file.read_text())


def unpack(file: Path, folder: Path) -> list[Path]:
    """Make the run folders of a pack again, below `folder`; gives their paths. A run may be there several times."""
    made: list[Path] = []
    with read_as("a pack of runs", file):
        lines = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            packed = json.loads(line)
            run, columns, files = Path(packed["run"]), dict(packed["metrics"]), dict(packed["files"])
            rows = [dict(zip(columns, row)) for row in zip(*columns.values(), strict=True)]
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{file}, line {number}: is not a packed run ({error!r})") from error
        for path in (run, *map(Path, files)):
            if path.is_absolute() or ".." in path.parts:
                raise RunError(f"{file}, line {number}: the name {str(path)!r} leaves the folder")
        place = folder / run
        if place in made:
            place = folder / f"again-{number}" / run
        for name, value in files.items():
            target = place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(value))
        place.mkdir(parents=True, exist_ok=True)
        (place / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
        made.append(place)
    return made


@contextmanager
def named_by(file: Path, folder: Path) -> Iterator[None]:
    """What is wrong with a run that was unpacked is said of its pack: the folder is gone when somebody reads it."""
    try:
        yield
    except RunError as error:
        raise RunError(str(error).replace(str(folder), str(file))) from error
