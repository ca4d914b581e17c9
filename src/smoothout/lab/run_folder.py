"""The folder of a run while it is written to: every file whole or not at all, and a lock against a second process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from smoothout.lab.config import Config, differences
from smoothout.lab.files import PARTIAL, RunError, write_atomically
from smoothout.lab.runs import (
    CHECKPOINT,
    CONFIG,
    FAILED,
    LOCK,
    METRICS,
    PREVIOUS,
    PROVENANCE,
    EpochMetrics,
    Provenance,
    read_config,
    read_json,
)


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
        before = read_json(self.path / PROVENANCE, "the provenance of a run", lambda it: list(it["starts"])) or []
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
            there = read_config(path)
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
