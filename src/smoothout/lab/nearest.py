"""What a wrong word was meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

NEAR = 0.6  # of 1, as difflib counts


def nearest(word: str, known: Iterable[str]) -> str:
    """`": did you mean 'x'?"`, with all that are equally near, or the known words where none is."""
    near = {each: SequenceMatcher(None, each, word).ratio() for each in known}
    best = max(near.values(), default=0.0)
    if best < NEAR:
        return f": choose one of {', '.join(near)}"
    *first, last = (repr(each) for each, how_near in near.items() if how_near == best)
    return f": did you mean {', '.join(first)}{' or ' if first else ''}{last}?"
