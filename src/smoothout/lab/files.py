"""Files of runs: written whole or not at all, and named when they cannot be read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

PARTIAL = ".partial"


class RunError(Exception):
    """A run folder cannot be used, or a run cannot go on. The message says what is there and what to do."""


def write_atomically(path: Path, content: bytes, afterwards: str = "") -> None:
    """Write under a temporary name, flush to the disk, rename. The old file stays until the new one is whole.

    Args:
        afterwards: what the same command does when it is given again, for the message of a write that fails.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
        _flush_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # the first error is the one to tell
            partial.unlink()
        raise RunError(
            f"{path}: cannot be written, {len(content) / 1e6:.1f} MB ({error.strerror}). What was there before is "
            f"untouched. Mend this and give the same command again{'; ' if afterwards else ''}{afterwards}."
        ) from error


def _flush_folder(folder: Path) -> None:
    """A rename is on the disk once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def read_as(what: str, file: Path) -> Iterator[None]:
    """Whatever fails inside because the file is cut short or of another kind is a RunError with its name."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise RunError(f"{file}: is not {what}, or is damaged ({why})") from error
