"""What a run leaves on disk, and reading it back.

    config.json          every setting, resolved, and their hash
    metrics.jsonl        one line an epoch; `seconds` is wall time, all else is a function of the configuration
    checkpoint.pt        to go on from; `checkpoint.previous.pt` is the one before
    model.safetensors    the weights of the last epoch          (when training is done)
    best.safetensors     those of the best epoch on the test split
    result.json          the record: settings, last and best epoch, provenance; its being there means done
    failed.json          in its place, why a run has none whose loss was no longer finite
    provenance.json      one entry a start of the run: versions, device, commit, command

`run_folder` writes them.
"""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

import smoothout
from smoothout.lab.config import Config
from smoothout.lab.files import RunError, read_as

CONFIG, METRICS, RESULT, PROVENANCE = "config.json", "metrics.jsonl", "result.json", "provenance.json"
CHECKPOINT, PREVIOUS, DAMAGED = "checkpoint.pt", "checkpoint.previous.pt", "checkpoint.damaged.pt"
LAST_WEIGHTS, BEST_WEIGHTS = "model.safetensors", "best.safetensors"
FAILED, LOCK = "failed.json", "lock"
T = TypeVar("T")


# ---- records -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EpochMetrics:
    """One epoch.

    Args:
        epoch: from 1.
        updates: so far.
        train_loss, train_accuracy: over the epoch as training saw it: at the noisy weights, in training mode.
        test_loss, test_accuracy: after it, at the clean weights, in evaluation mode.
        learning_rate, strength: of its last update.
        evaluations: passes of back-propagation over a batch, so far.
        smoothed_loss: C̄ on the training images at this strength, where it was asked for.
        seconds: wall time of the epoch, shared out among runs that shared a device. It alone differs from run to run.
    """

    epoch: int
    updates: int
    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float
    learning_rate: float
    strength: float
    evaluations: float
    smoothed_loss: float | None
    seconds: float

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EpochMetrics:
        return cls(smoothed_loss=values.get("smoothed_loss"), **{name: values[name] for name in _OF_EVERY_EPOCH})


_OF_EVERY_EPOCH = [each.name for each in fields(EpochMetrics) if each.name != "smoothed_loss"]


@dataclass(frozen=True)
class Provenance:
    """Where and how a run, or its last part, was made.

    Args:
        together: how many runs shared the device, in turns; None in records made before this was noted, whose seconds
            other runs may have lengthened.
    """

    started: str
    command: str
    smoothout: str
    commit: str | None
    python: str
    torch: str
    numpy: str
    device: str
    cuda: str | None
    processes: int
    threads: int
    together: int | None = None

    @classmethod
    def here(cls, device: torch.device, processes: int = 1, together: int = 1) -> Provenance:
        """That of this process, now."""
        is_cuda = device.type == "cuda"
        return cls(
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            command=shlex.join(["smoothout", *sys.argv[1:]]),
            smoothout=smoothout.__version__,
            commit=_commit(),
            python=platform.python_version(),
            torch=torch.__version__,
            numpy=np.__version__,
            device=torch.cuda.get_device_name(device) if is_cuda else f"cpu ({platform.machine()})",
            cuda=torch.version.cuda if is_cuda else None,
            processes=processes,
            threads=torch.get_num_threads(),
            together=together,
        )


@dataclass(frozen=True)
class Record:
    """A finished run: what was asked, what came of it, where.

    Args:
        last, best: the last epoch, and the one with the best test accuracy (the first of equals); never mixed.
        test_origin: "test", or which training images were held out in its place.
        ghost_batches: into how many a batch of one process was cut.
        seconds: wall time of training, interruptions not counted; of runs that shared a device each has its share.
        as_trained: where BatchNorm's statistics were measured anew at the end, loss and accuracy of the last epoch
            with those that training had left.
    """

    config: Config
    last: EpochMetrics
    best: EpochMetrics
    parameters: int
    train_images: int
    test_images: int
    test_origin: str
    ghost_batches: int
    seconds: float
    provenance: Provenance
    as_trained: dict[str, float] | None = None

    @property
    def reported(self) -> EpochMetrics:
        """The epoch that counts by the configuration."""
        return self.best if self.config.report == "best" else self.last

    def images(self, split: Literal["train", "test"]) -> int:
        """How many a split has."""
        return self.train_images if split == "train" else self.test_images

    def to_dict(self) -> dict[str, Any]:
        """One flat object: every setting is a field of its own."""
        rest = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "config"}
        nested = {name: asdict(rest[name]) for name in ("last", "best", "provenance")}
        return {"config_hash": self.config.hash, **self.config.to_dict(), **rest, **nested}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Record:
        settings = {each.name: values[each.name] for each in fields(Config) if each.name in values}
        rest: dict[str, Any] = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        rest["last"], rest["best"] = EpochMetrics.from_dict(rest["last"]), EpochMetrics.from_dict(rest["best"])
        rest["provenance"] = Provenance(**rest["provenance"])
        return cls(config=Config.from_dict(settings), **rest)


def _commit() -> str | None:
    """The commit this package is run from, with `+` for local changes; None where it is installed."""
    package = Path(smoothout.__file__).resolve().parent

    def git(*arguments: str) -> str:
        answer = subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, text=True, timeout=10)
        return answer.stdout.strip() if answer.returncode == 0 else ""

    try:
        # An installed copy may lie inside a repository that is not this one.
        if git("rev-parse", "--show-prefix") != "src/smoothout/":
            return None
        commit = git("rev-parse", "HEAD")
        return (commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")) or None
    except (OSError, subprocess.SubprocessError):
        return None


# ---- reading -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run folder as it is now.

    Args:
        record: None until training is done.
        failure: how it ended, if by a loss that was not finite.
    """

    path: Path
    config: Config
    metrics: tuple[EpochMetrics, ...]
    record: Record | None
    failure: str = ""

    def weights(self, which: Literal["last", "best"] = "last") -> dict[str, Tensor]:
        """The weights of the last or of the best epoch."""
        file = self.path / {"last": LAST_WEIGHTS, "best": BEST_WEIGHTS}[which]
        if not file.exists():
            gone = f"it was removed. Remove {RESULT}, too, and run its command again"
            why = "training is not done. Run its command again" if self.record is None else gone
            raise RunError(f"{self.path}: has no {file.name}: {why}")
        with read_as("a file of weights", file):
            return safetensors.torch.load_file(file)


def load_run(path: str | Path) -> Run:
    """Read a run folder."""
    path = Path(path)
    config = read_config(path)
    if config is None:
        raise RunError(f"{path}: is no run folder: it has no {CONFIG}")
    metrics = _read_metrics(path / METRICS)
    record = read_json(path / RESULT, "the record of a finished run", Record.from_dict)
    failure = read_json(path / FAILED, "the failure of a run", lambda it: it["message"])
    return Run(path, config, metrics, record, failure or "")


def finished(path: Path, config: Config) -> Record | None:
    """The record of a folder whose run is done; None if it is not, or is no such folder yet."""
    if not (path / RESULT).exists():
        return None
    run = load_run(path)
    return run.record if run.config == config else None


def best_of(epochs: Iterable[EpochMetrics]) -> EpochMetrics:
    """The epoch with the best test accuracy, the first of equals."""
    return max(epochs, key=lambda epoch: epoch.test_accuracy)


def _read_metrics(file: Path) -> tuple[EpochMetrics, ...]:
    with read_as("one line of metrics an epoch", file):
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return tuple(EpochMetrics.from_dict(json.loads(line)) for line in lines)


def read_config(path: Path) -> Config | None:
    return read_json(path / CONFIG, "the configuration of a run", lambda it: Config.from_dict(it["settings"]))


def read_json(file: Path, what: str, make: Callable[[Any], T]) -> T | None:
    """What is made of a file's content; None if it is not there."""
    with read_as(what, file):
        return make(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None


def find_runs(*places: str | Path) -> list[Path]:
    """Run folders at these places and below them, such as RUN/seed-0 of RUN."""
    return sorted({file.parent for place in places for file in Path(place).rglob(CONFIG) if _is_of_a_run(file)})


def _is_of_a_run(file: Path) -> bool:
    """Not another program's, which gives its files the same name; a damaged one may be, and is refused by its name."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return isinstance(content, dict) and "settings" in content
