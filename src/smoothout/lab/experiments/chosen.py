"""What preset `ours` adds to a network's rows: chosen on training images held out, never on the test set.

`smoothout reproduce choice --preset ours` makes the runs and says which candidate is the best of each network, batch
size and method; that is entered here, with the date in docs/log.md, and a test compares it with the records. Nothing
here: the preset's own values.
"""

from __future__ import annotations

from typing import Any

CHOSEN: dict[tuple[str, int, str], dict[str, Any]] = {}  # by model, batch size and method
