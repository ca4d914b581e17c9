"""The demo: small and large batch, with and without SmoothOut, on the embedded digits; then how flat each minimum is.

Learning rates were chosen for plain training on 300 training images held out (`--hold-out 300`), by their loss, and
then strengths at that rate. See docs/log.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smoothout.lab import measurements
from smoothout.lab.config import Config, resolve
from smoothout.lab.files import write_atomically
from smoothout.lab.groups import FEWEST_RUNS, group_runs
from smoothout.lab.report.findings import findings_section
from smoothout.lab.report.measured import SENSITIVITY
from smoothout.lab.report.page import Page, Section
from smoothout.lab.report.sections import all_sections, provenance
from smoothout.lab.runs import load_run
from smoothout.lab.train.start import Options, train
from smoothout.lab.trained import load_trained

SMALL, LARGE = 16, 718  # of 1,437 training images
SETTINGS: dict[int, dict[str, Any]] = {
    SMALL: {"epochs": 40, "lr": 0.05},
    LARGE: {"epochs": 120, "lr": 0.05},  # training longer
}
STRENGTHS = {
    SMALL: {"plain": None, "smoothout": 0.0375, "adasmoothout": 0.15},
    LARGE: {"plain": None, "smoothout": 0.1, "adasmoothout": 0.5},
}
NOISE_GRID = (0.0, 0.025, 0.05, 0.075, 0.1, 0.125, 0.15)
DRAWS = 10

LEAD = (
    "A small network learns to read 8 × 8 digits, with small and with large batches, by plain SGD, by SmoothOut and by "
    "AdaSmoothOut. Then every network's weights are shaken, to see how flat its minimum is. The learning rate was "
    "chosen for plain SGD, and then a strength for each method, by the loss on training images that were set aside."
)


def configurations(seeds: int) -> list[Config]:
    """All runs of the demo."""
    return [
        resolve(
            dataset="digits",
            model="mlp",
            method=method,
            strength=strength,
            batch_size=batch_size,
            seed=seed,
            **settings,
        )
        for batch_size, settings in SETTINGS.items()
        for method, strength in STRENGTHS[batch_size].items()
        for seed in range(seeds)
    ]


@dataclass(frozen=True)
class Demo:
    """The page, and its sections that hold tables."""

    page: Path
    tables: tuple[Section, ...]


def run_demo(out: Path, seeds: int, say: Callable[[int, int, str], None]) -> Demo:
    """Train, measure, write the page.

    Args:
        seeds: runs of each kind, as many as a claim needs or more.
        say: told (runs done, runs in all, what comes next).
    """
    if seeds < FEWEST_RUNS:
        raise ValueError(f"--seeds {seeds}: expected at least {FEWEST_RUNS}; fewer runs of a kind show no difference")
    torch.set_num_threads(1)  # the network is too small for more
    configs = configurations(seeds)
    folders = []
    for done, config in enumerate(configs):
        say(done, len(configs), f"{config.method}, batch {config.batch_size}, seed {config.seed}")
        folder = out / f"batch-{config.batch_size}" / config.method / f"seed-{config.seed}"
        train(config, folder, Options(device="cpu", checkpoint_every=1000, quiet=True))
        _measure(folder)
        folders.append(folder)
    say(len(configs), len(configs), "writing the page")
    return _write_page(out, folders)


def _measure(folder: Path) -> None:
    if SENSITIVITY in measurements.load_all(folder):
        return
    trained = load_trained(folder, device="cpu")
    measurements.save(folder, measurements.take("sensitivity", trained, strengths=NOISE_GRID, draws=DRAWS))


def _write_page(out: Path, folders: list[Path]) -> Demo:
    groups = group_runs(load_run(folder) for folder in folders)
    findings = findings_section(groups)
    sections = (*((findings,) if findings else ()), *all_sections(groups))
    records = [record for group in groups for record in group.records]
    # That of the runs: the command itself takes no time where it has only to write the page again.
    foot = (*provenance(records, "smoothout demo"), ("Time", f"{sum(r.seconds for r in records):.0f} s of training"))
    page = Page("What flatness is, and what SmoothOut does", LEAD, sections, foot, lesson=True)
    path = (out / "index.html").resolve()
    write_atomically(path, page.to_html().encode())
    return Demo(path, tuple(section for section in sections if section.table is not None))
