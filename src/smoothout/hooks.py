"""Hooks that belong to one model: they stay behind when it is copied or pickled, and do not keep it alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Hook:
    """Calls a function. A copy of the module it is registered on (an EMA, a teacher, a pickled model) gets one that
    does nothing: its weights are its own, and take no noise."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _nothing, ()


def weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method for a global hook: one that does not keep its object alive, and does nothing when that is gone."""
    reference = weakref.WeakMethod(method)
    return lambda *args: (reference() or nothing)(*args)


def remove_all(handles: list[Any]) -> None:
    """Take hooks away."""
    while handles:
        handles.pop().remove()


def nothing(*args: Any) -> None:
    """The hook of a copy."""


def _nothing() -> Callable[..., None]:
    return nothing
