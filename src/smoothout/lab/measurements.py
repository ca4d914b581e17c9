"""Measurements of runs, kept in their folders: RUN/measurements/NAME.json."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch

from smoothout import measure
from smoothout.lab.files import RunError, read_as, write_atomically
from smoothout.lab.trained import OnePass, Trained, mean_loss

WITH_ACCURACY = ("sensitivity", "landscape")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sharpness": measure.sharpness,
    "sensitivity": measure.sensitivity,
    "landscape": measure.landscape,
    "curvature": measure.curvature,
    "interpolation": measure.interpolate,
}
_NO_SETTINGS = ("accuracy_fn", "progress")

FOLDER = "measurements"


@dataclass(frozen=True)
class Measurement:
    """One result, and how it was obtained.

    Args:
        name: KIND-SPLIT, such as sharpness-train; it names the file.
        how: split, weights, settings, seconds, device, versions.
    """

    name: str
    result: Any
    how: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """All that changes its result; where the number of images is not known, it is None."""
        kind = self.name.split("-")[0]
        grid = {"alphas": self.result.alphas} if kind == "interpolation" else {}
        return settings_of(kind, {**self.how, **grid})


def settings_of(kind: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting that changes the result of this kind of measurement; what is not told has its default."""
    parameters = signature(_FUNCTIONS[kind]).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in _NO_SETTINGS}
    defaults |= {"strengths": None, "alphas": None, "weights": "last", "images": None}
    found = {name: told.get(name, default) for name, default in defaults.items()}
    if found.get("fresh_noise_per_batch"):
        found["batch_size"] = told.get("batch_size")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def refuse_read_only(run: Path) -> None:
    """Now rather than after minutes of measuring, whose result would be lost."""
    folder = run / FOLDER if (run / FOLDER).exists() else run
    if not os.access(folder, os.W_OK):
        raise RunError(f"{folder}: cannot be written, and results are kept there. Measure a copy of the run")


def save(run: Path, measurement: Measurement) -> Path:
    """Write a measurement into its run's folder."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{measurement.name}.json"
    content = {"name": measurement.name, "how": measurement.how, "result": measurement.result.to_json()}
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    return path


def settings_kept(run: Path, name: str) -> dict[str, Any] | None:
    """How the measurement of this name was made; None where there is none that can be read."""
    try:
        return load(run, name).settings
    except (OSError, RunError):
        return None


def load_all(run: Path) -> dict[str, Measurement]:
    """Every measurement of a run, by name."""
    return {path.stem: load(run, path.stem) for path in sorted((run / FOLDER).glob("*.json"))}


def load(run: Path, name: str) -> Measurement:
    """The measurement of this name."""
    path = run / FOLDER / f"{name}.json"
    with read_as("a measurement", path):
        content = json.loads(path.read_text(encoding="utf-8"))
        kind = getattr(measure, content["result"]["kind"])
        return Measurement(content["name"], kind.from_json(content["result"]), content["how"])


def take(
    kind: Literal["sharpness", "sensitivity", "landscape", "curvature"],
    trained: Trained,
    split: Literal["train", "test"] = "train",
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> Measurement:
    """Measure one trained network with the function of that name in `smoothout.measure`."""
    loss_fn, more = mean_loss, {}
    if kind in WITH_ACCURACY:
        one_pass = OnePass()
        loss_fn, more = one_pass.loss, {"accuracy_fn": one_pass.accuracy}
    started = time.monotonic()
    held, batches = trained.held(split), trained.batches(split)
    result = _FUNCTIONS[kind](trained.model, loss_fn, held, progress=progress, **more, **settings)
    how = {"split": split, "images": len(batches.split), "batch_size": batches.batch_size, **settings}
    how |= _surroundings(trained, started)
    return Measurement(f"{kind}-{split}", result, how)


def take_interpolation(
    a: Trained,
    b: Trained,
    alphas: tuple[float, ...],
    split: Literal["train", "test"] = "train",
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> Measurement:
    """Loss and accuracy on the line from run a (α = 0) to run b (α = 1); kept with run a."""
    started, one_pass = time.monotonic(), OnePass()
    states = a.model.state_dict(), b.model.state_dict()
    result = measure.interpolate(
        a.model,
        *states,
        one_pass.loss,
        a.held(split),
        alphas,
        accuracy_fn=one_pass.accuracy,
        progress=progress,
        **settings,
    )
    how = {
        "split": split,
        "images": len(a.batches(split).split),
        "to": b.run.config.hash,
        **settings,
        **_surroundings(a, started),
    }
    return Measurement(f"interpolation-{split}-{b.run.config.hash}", result, how)


def _surroundings(trained: Trained, started: float) -> dict[str, Any]:
    device = next(trained.model.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    # torch's default: fp32 convolutions round their factors to 10 bits (TF32), matrix products do not.
    rounds = device.type == "cuda" and torch.backends.cudnn.allow_tf32
    return {
        "weights": trained.which,
        "seconds": round(time.monotonic() - started, 3),
        "device": name,
        "precision": "fp32, convolutions in TF32" if rounds else "fp32",
        "torch": torch.__version__,
    }
