"""Arguments that are numbers, checked: errors name the argument, its value and what would be right.

NumPy's numbers are taken like Python's, and given back as Python's, which JSON and torch know.
"""

from __future__ import annotations

import math
import numbers
from typing import Any


def is_whole(value: Any) -> bool:
    """Whether this is a whole number, of Python or NumPy; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether this is a real number, of Python or NumPy; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def whole_number(name: str, value: Any, least: int = 1, why: str = "") -> int:
    """A whole number that is not below `least`."""
    if not is_whole(value) or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number of at least {least}{why}")
    return int(value)


def positive_number(name: str, value: Any, such_as: str) -> float:
    """A finite number above 0."""
    if not is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r}: give a positive number, such as {such_as}")
    return float(value)


def list_of_numbers(name: str, values: Any, such_as: str) -> tuple[float, ...]:
    """Numbers, in a list or whatever else can be gone through."""
    try:
        if isinstance(values, str):
            raise TypeError(values)
        return tuple(float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}={values!r}: give a list of numbers, such as {such_as}") from error


def seed_number(value: Any) -> int:
    """A seed, as every generator takes it."""
    if not is_whole(value):
        raise TypeError(f"seed={value!r}: give a whole number of 64 bits")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"seed={value!r}: give a whole number of 64 bits")
    return int(value)
