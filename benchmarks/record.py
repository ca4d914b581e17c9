"""What every benchmark shares: arguments, fair timing, and a record with hardware, versions, n and spread."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch


def arguments(description: str | None, **defaults: Any) -> argparse.Namespace:
    """`--device`, `--out`, and a whole-number option for each default."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write a JSON record here")
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args()


class Rows(list):
    """Rows of a table, each shown and recorded as it comes: a benchmark that is stopped has said what it knew."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self._args = args

    def append(self, row: dict[str, Any]) -> None:
        super().append(row)
        print("; ".join(f"{name} {_cell(value)}" for name, value in row.items()), file=sys.stderr, flush=True)
        if self._args.out is not None:
            write(_partial(self._args.out), self._args, self, "stopped before its end")


def in_turns(
    functions: dict[str, Callable[[], Any]], rounds: int, device: str, warm_up: int = 3, block: int = 1
) -> dict[str, list[float]]:
    """Milliseconds of a call of each function, by turns: a slow moment of the machine hits all alike.

    A turn is a block of calls without a pause: on CUDA the host waits for the device only at its end, as in training,
    so host work that the device's hides is not counted.
    """

    def turn(function: Callable[[], Any]) -> None:
        for _ in range(block):
            function()

    for function in functions.values():
        for _ in range(warm_up):
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(milliseconds(partial(turn, function), device) / block)
    return times


def milliseconds(function: Callable[[], Any], device: str) -> float:
    """One call: on CUDA between two events on an idle stream, so the host's work counts where it is the bottleneck.

    On a CPU with one thread (OMP_NUM_THREADS=1) the process's own time, which other programs disturb less.
    """
    if device == "cpu":
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        function()
        return 1e3 * (clock() - start)
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    before.record()
    function()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after)


def device_milliseconds(function: Callable[[], Any], repeats: int = 20, rounds: int = 11) -> list[float]:
    """Device time of one call: captured in a CUDA graph many times over, so that launches cost the host nothing."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            function()
    graph.replay()
    return [milliseconds(graph.replay, "cuda") / repeats for _ in range(rounds)]


def summary(values: Iterable[float]) -> dict[str, float]:
    """Median, and the quartiles as the spread."""
    values = list(values)
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": middle, "low": low, "high": high, "n": len(values)}


def ratios(times: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """Time of each function over the base's in the same round."""
    return {name: summary(t / b for t, b in zip(values, times[base])) for name, values in times.items()}


def machine(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError:
        facts["triton"] = None
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _partial(out: Path) -> Path:
    """Where the record of a benchmark is that has not ended."""
    return out.with_suffix(f".partial{out.suffix}")


def write(out: Path | None, args: argparse.Namespace, rows: list[dict[str, Any]], notes: str) -> dict[str, Any]:
    """The record, into a file if there is one to be."""
    record = {
        "benchmark": Path(sys.argv[0]).stem,
        "command": " ".join(["python", *map(_without_folders, sys.argv)]),
        "commit": _commit(),
        "machine": machine(args.device),
        "notes": notes,
        "rows": rows,
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")
    return record


def finish(args: argparse.Namespace, columns: list[str], rows: list[dict[str, Any]], notes: str = "") -> None:
    """Write the record, and print the table last."""
    record = write(args.out, args, rows, notes)
    if args.out is not None:
        _partial(args.out).unlink(missing_ok=True)
    table = [columns, *[[_cell(row.get(column, "")) for column in columns] for row in rows]]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    print(", ".join(f"{key} {value}" for key, value in record["machine"].items()))
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['median']:.4g} ({value['low']:.4g} to {value['high']:.4g})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _without_folders(argument: str) -> str:
    """Records are published: of an absolute path the last part."""
    option, is_with_value, value = argument.rpartition("=")
    return option + is_with_value + (Path(value).name if Path(value).is_absolute() else value)


def _commit() -> str | None:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
