"""Seconds to import smoothout, beside torch alone, each in a process of its own; and that it does not load Triton."""

from __future__ import annotations

import subprocess
import sys

from record import arguments, finish, summary

PROGRAM = (
    "import time; start = time.perf_counter(); import {0}; seconds = time.perf_counter() - start\n"
    "import sys; print(seconds, 'triton' in sys.modules, 'scipy' in sys.modules)"
)


def main() -> None:
    args = arguments(__doc__, rounds=7)
    times: dict[str, list[float]] = {"torch": [], "smoothout": []}
    loaded: dict[str, str] = {}
    for _ in range(args.rounds):
        for name, values in times.items():
            command = [sys.executable, "-c", PROGRAM.format(name)]
            seconds, *found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            values.append(float(seconds))
            loaded[name] = ", ".join(m for m, there in zip(("triton", "scipy"), found) if there == "True") or "neither"
    rows = [{"import": name, "seconds": summary(t), "loads triton, scipy": loaded[name]} for name, t in times.items()]
    extra = summary(s - t for s, t in zip(times["smoothout"], times["torch"]))
    rows.append({"import": "smoothout − torch", "seconds": extra, "loads triton, scipy": ""})
    finish(args, ["import", "seconds", "loads triton, scipy"], rows)


if __name__ == "__main__":
    main()
