"""What a wrong word was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """`": did you mean 'x'?"`, or the known words where none is near."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f": did you mean {close[0]!r}?" if close else f": choose one of {', '.join(known)}"
