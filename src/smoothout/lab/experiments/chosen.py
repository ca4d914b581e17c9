"""What preset `ours` adds to a network's rows: chosen on training images held out, never on the test set.

`smoothout reproduce choice --preset ours` makes the runs and prints them side by side; whoever reads off a choice
enters it here, by (network, method), with the date in docs/log.md. Nothing here: the preset's own values.
"""

from __future__ import annotations

from typing import Any

CHOSEN: dict[tuple[str, str], dict[str, Any]] = {}
