"""What a run leaves on disk, and reading it back.

    config.json          every setting, resolved, and their hash
    metrics.jsonl        one line an epoch; `seconds` is wall time, all else is a function of the configuration
    checkpoint.pt        to go on from; `checkpoint.previous.pt` is the one before
    model.safetensors    the weights of the last epoch          (when training is done)
    best.safetensors     those of the best epoch on the test split
    result.json          the record: settings, last and best epoch, provenance; its being there means done
    failed.json          in its place, why a run has none whose loss was no longer finite
    provenance.json      one entry a start of the run: versions, device, commit, command

Every file is written under a temporary name, flushed to the disk and renamed: whoever reads finds the old one or the
new one. A lock keeps a second process out.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

import smoothout
from smoothout.lab.config import Config, differences
from smoothout.lab.files import PARTIAL, RunError, read_as, write_atomically

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
        together: runs that shared the device, in turns; None in records of before it was noted, whose seconds others on
            the device may have lengthened.
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
        """Of this process, now."""
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
    config = _read_config(path)
    if config is None:
        raise RunError(f"{path}: is no run folder: it has no {CONFIG}")
    metrics = _read_metrics(path / METRICS)
    record = _read_json(path / RESULT, "the record of a finished run", Record.from_dict)
    failure = _read_json(path / FAILED, "the failure of a run", lambda it: it["message"])
    return Run(path, config, metrics, record, failure or "")


def best_of(epochs: Iterable[EpochMetrics]) -> EpochMetrics:
    """The epoch with the best test accuracy, the first of equals."""
    return max(epochs, key=lambda epoch: epoch.test_accuracy)


def _read_metrics(file: Path) -> tuple[EpochMetrics, ...]:
    with read_as("one line of metrics an epoch", file):
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return tuple(EpochMetrics.from_dict(json.loads(line)) for line in lines)


def _read_config(path: Path) -> Config | None:
    return _read_json(path / CONFIG, "the configuration of a run", lambda it: Config.from_dict(it["settings"]))


def _read_json(file: Path, what: str, make: Callable[[Any], T]) -> T | None:
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


# ---- writing -----------------------------------------------------------------------------------------------------


class RunFolder:
    """A run folder that this process writes to. Made by `open_folder`, which holds the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write_json(self, name: str, value: Any) -> None:
        self._write(name, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())

    def write_metrics(self, history: list[EpochMetrics]) -> None:
        lines = "".join(json.dumps(asdict(epoch)) + "\n" for epoch in history)
        self._write(METRICS, lines.encode())

    def write_weights(self, name: str, weights: dict[str, Tensor], epoch: int) -> None:
        # Clones, since safetensors refuses tied weights that share memory.
        tensors = {key: value.detach().cpu().contiguous().clone() for key, value in weights.items()}
        self._write(name, safetensors.torch.save(tensors, metadata={"epoch": str(epoch)}))

    def write_checkpoint(self, content: bytes) -> None:
        """The new checkpoint; the one that was there becomes the previous one. At every moment there is one of them."""
        current, previous = self.path / CHECKPOINT, self.path / PREVIOUS
        if current.exists():
            link = previous.with_name(PREVIOUS + PARTIAL)
            try:
                link.unlink(missing_ok=True)
                os.link(current, link)
                link.replace(previous)
            except OSError as error:
                if error.errno in (errno.EROFS, errno.ENOSPC):
                    raise RunError(f"{previous}: cannot be written ({error.strerror})") from error
                # A file system without hard links goes without a previous checkpoint.
        self._write(CHECKPOINT, content)

    def _write(self, name: str, content: bytes) -> None:
        write_atomically(self.path / name, content, afterwards="a training goes on from its last checkpoint")

    def begin(self, config: Config, provenance: Provenance) -> None:
        """From here on the folder belongs to this configuration."""
        (self.path / FAILED).unlink(missing_ok=True)  # it is tried again
        if not (self.path / CONFIG).exists():
            self.write_json(CONFIG, {"hash": config.hash, "settings": config.to_dict()})
        before = _read_json(self.path / PROVENANCE, "the provenance of a run", lambda it: list(it["starts"])) or []
        self.write_json(PROVENANCE, {"starts": [*before, asdict(provenance)]})


class NoFolder:
    """What processes other than the first write to: nothing."""

    def write_json(self, name: str, value: Any) -> None: ...
    def write_metrics(self, history: list[EpochMetrics]) -> None: ...
    def write_weights(self, name: str, weights: dict[str, Tensor], epoch: int) -> None: ...
    def write_checkpoint(self, content: bytes) -> None: ...
    def begin(self, config: Config, provenance: Provenance) -> None: ...


_held: set[Path] = set()


@contextmanager
def open_folder(path: Path, config: Config) -> Iterator[RunFolder]:
    """Make or enter the folder of a run, and keep others out meanwhile.

    Raises RunError if it holds another configuration, if another process works in it, or if it cannot be written.
    A folder that was made here and in which no run began goes away again.
    """
    path = path.absolute()
    made = [each for each in (path, *path.parents) if not each.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        _refuse_other_files(path)
        here = path.resolve()  # by whatever name it is called
        if here in _held:
            # Before the file is opened: a process that closes a file loses its record locks on it.
            raise RunError(f"{path}: is in use by process {os.getpid()}. Wait for it, or choose another --out.")
        stream = (path / LOCK).open("a+")
    except OSError as error:
        raise RunError(f"{path}: cannot be used as a run folder ({error.strerror})") from error
    with stream:
        _lock(path, stream)
        _held.add(here)
        try:
            for leftover in path.glob(f"*{PARTIAL}"):  # of a process that was killed while it wrote
                leftover.unlink()
            there = _read_config(path)
            if there is not None and there != config and not _discard_if_untrained(path):
                fields_ = "".join(f"\n  {line}" for line in differences(there, config))
                raise RunError(f"{path}: holds a run of another configuration:{fields_}\nChoose another --out.")
            yield RunFolder(path)
        finally:
            _held.discard(here)
            if made and not (path / CONFIG).exists():
                _remove_empty(made)


def _discard_if_untrained(path: Path) -> bool:
    """Whether the run there ended before its first checkpoint, as for lack of memory: then its settings bind nobody."""
    if {entry.name for entry in path.iterdir()} - {CONFIG, PROVENANCE, LOCK}:
        return False
    for name in (PROVENANCE, CONFIG):
        (path / name).unlink(missing_ok=True)
    return True


def _remove_empty(folders: list[Path]) -> None:
    """Those that hold nothing but a lock, the innermost first."""
    with suppress(OSError):  # what somebody else put there stays
        (folders[0] / LOCK).unlink()
        for folder in folders:
            folder.rmdir()


def finished(path: Path, config: Config) -> Record | None:
    """The record of a folder whose run is done; None if it is not, or is no such folder yet."""
    if not (path / RESULT).exists():
        return None
    run = load_run(path)
    return run.record if run.config == config else None


def _lock(path: Path, stream: Any) -> None:
    # A record lock, unlike flock's, is not inherited by worker processes, which may outlive a process that is killed.
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        stream.seek(0)
        holder = stream.read().strip() or "another process"
        raise RunError(f"{path}: is in use by {holder}. Wait for it, or choose another --out.") from error
    with suppress(OSError):  # a full disk: the lock holds without the number. Unbuffered, or closing would try again
        os.ftruncate(stream.fileno(), 0)
        os.pwrite(stream.fileno(), f"process {os.getpid()}\n".encode(), 0)


def _refuse_other_files(path: Path) -> None:
    """A folder that is not empty and is no run is somebody's, and stays as it is."""
    names = {entry.name for entry in path.iterdir()} - {LOCK}
    if names and CONFIG not in names and not all(name.endswith(PARTIAL) for name in names):
        raise RunError(f"{path}: is not empty and holds no run ({sorted(names)[0]} is there). Choose another --out.")
