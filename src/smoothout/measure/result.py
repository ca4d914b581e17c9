"""What every measurement returns: a frozen dataclass that turns into plain JSON and back, and plots itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Self

Progress = Callable[[int, int], None]


def no_progress(done: int, total: int) -> None:
    """Where nobody asked to be told how far a measurement is."""


class Result:
    """The common part of all results; fields are numbers, strings, booleans, None, results and tuples of these."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, with the class in `"kind"`; NaN and infinities, which JSON does not know, as strings."""
        values = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]
        return {"kind": type(self).__name__, **values}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """The result that `to_json()` described."""
        if record.get("kind") != cls.__name__:
            raise ValueError(f"this record is of kind {record.get('kind')!r}, not {cls.__name__!r}")
        return cls(**{name: cls._read(name, value) for name, value in record.items() if name != "kind"})

    @classmethod
    def _read(cls, name: str, value: Any) -> Any:
        return _restored(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Result):
        return value.to_json()
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_restored(v) for v in value)
    return float(value) if value in ("nan", "inf", "-inf") else value
