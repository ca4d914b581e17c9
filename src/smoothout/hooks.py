"""Hooks that belong to one model: they stay behind when it is copied or pickled, and do not keep it alive."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

# For code that a compiled caller must leave alone: the compiler follows neither hooks nor NumPy's noise. This is
# what torch.optim uses; `torch.compiler.disable` would import the compiler (a second and a half) with this module.
untraced = torch._disable_dynamo


class Hook:
    """Calls a function. A copy of the module it is registered on (an EMA, a teacher, a pickled model) gets one that
    does nothing: its weights are its own, and take no noise.

    Args:
        on_copy: called when the module is copied or pickled.
    """

    def __init__(self, function: Callable[..., Any], on_copy: Callable[[], Any] | None = None) -> None:
        self._function, self._on_copy = function, nothing if on_copy is None else on_copy

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        self._on_copy()
        return nothing

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        self._on_copy()
        return _nothing, ()


class StateDictHook:
    """One hook on the `state_dict()` of many modules, to be put on and taken off often.

    It writes to their dictionaries of hooks itself, under one number that torch gives to no other hook: a handle of
    torch's own for every module would take longer than the noise.
    """

    def __init__(self, modules: Iterable[nn.Module], hook: Hook) -> None:
        self._dictionaries = [cast("OrderedDict[int, Any]", module._state_dict_hooks) for module in modules]
        self._hook, self._number = hook, RemovableHandle(OrderedDict()).id

    def put_on(self) -> None:
        for hooks in self._dictionaries:
            hooks[self._number] = self._hook
            hooks.move_to_end(self._number, last=False)  # a user's own may rename or convert what this one cleans

    def remove(self) -> None:
        for hooks in self._dictionaries:
            hooks.pop(self._number, None)


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
