"""Measurements of a run, kept in its folder: RUN/measurements/NAME.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoothout import measure
from smoothout.lab.runs import write_atomically

FOLDER = "measurements"


@dataclass(frozen=True)
class Measurement:
    """One result, and how it was obtained: settings, split, seconds, device."""

    name: str
    result: Any
    how: dict[str, Any]


def save(run: Path, measurement: Measurement) -> Path:
    """Write a measurement into its run's folder."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{measurement.name}.json"
    content = {"name": measurement.name, "how": measurement.how, "result": measurement.result.to_json()}
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    return path


def load_all(run: Path) -> dict[str, Measurement]:
    """Every measurement of a run, by name."""
    found = {}
    for path in sorted((run / FOLDER).glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        kind = getattr(measure, content["result"]["kind"])
        found[content["name"]] = Measurement(content["name"], kind.from_json(content["result"]), content["how"])
    return found
