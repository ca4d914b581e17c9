"""What is still to be done for experiments: runs with their measurements, and lines between runs, in order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from smoothout.lab.config import Config
from smoothout.lab.data import catalogue
from smoothout.lab.experiments.records import Found, Records, is_in_longer_runs
from smoothout.lab.experiments.speeds import Speeds
from smoothout.lab.experiments.vocabulary import Experiment, Line, Measuring


@dataclass(frozen=True)
class Task:
    """A run to train, if it is not, and then to measure; or, with a line, two finished runs to look between.

    Args:
        config: with its seed; of a line the run at the start.
        trains: whether it is still to be trained.
        seconds: estimated.
        is_begun: a checkpoint of it is there.
    """

    config: Config
    measurements: tuple[Measuring, ...] = ()
    line: Line | None = None
    trains: bool = False
    seconds: float = 0.0
    is_begun: bool = False

    def __str__(self) -> str:
        config = self.config
        what = f"{config.model}, {config.dataset}, batch {config.batch_size}, {config.method}, preset {config.preset}"
        line = f"line to {self.line.end.method}, batch {self.line.end.batch_size}: " if self.line else ""
        return f"{line}{what}, seed {config.seed}, {config.hash}"


@dataclass(frozen=True)
class Plan:
    """Tasks in the order they are to be done, and what cannot be done here.

    Args:
        runs, done: how many runs the experiments want, and how many of them are trained.
        absent: data sets that are not here, with the number of runs that want them.
        unmeasured: runs known only from packs, so without weights, of which something is still to be measured.
    """

    tasks: tuple[Task, ...]
    runs: int
    done: int
    absent: dict[str, int]
    unmeasured: int

    @property
    def seconds(self) -> float:
        return sum(task.seconds for task in self.tasks)


def plan(
    experiments: Iterable[Experiment],
    seeds: Sequence[int],
    records: Records,
    speeds: Speeds,
    data_root: Path | None = None,
    retrain: bool = False,
    others: Iterable[Experiment] = (),
) -> Plan:
    """What is missing: seed by seed, what was begun first, then baselines, then from the cheapest to the dearest.

    Args:
        retrain: train runs again that are known from packs only, where something of them is still to be measured.
        others: what these want to know of a run is measured too when it is trained: its weights may be gone later.
    """
    runs, lines = _wanted(experiments, seeds)
    others_want, _ = _wanted(others, seeds)
    here = {dataset: catalogue.is_here(dataset, data_root) for dataset in {config.dataset for config in runs}}
    open_ends = _open_ends(lines, records)
    tasks: list[Task] = []
    absent: Counter[str] = Counter()
    done = unmeasured = 0
    for config, wanted in runs.items():
        found = records.of(config)
        is_done = found is not None and found.is_done
        done += is_done
        also = _without_doubles((*wanted, *others_want.get(config, ())))
        task = _task(config, wanted, also, found, speeds, lacks_line=config.hash in open_ends)
        if task is None:
            continue
        if is_done and task.trains and not retrain:
            unmeasured += 1
        elif not here[config.dataset]:
            absent[config.dataset] += 1
        else:
            tasks.append(task)
    tasks += _line_tasks(lines, records, speeds, tasks)
    order = sorted(tasks, key=_place_in_queue)
    return Plan(tuple(order), len(runs), done, dict(absent), unmeasured)


def _place_in_queue(task: Task) -> tuple[int, bool, bool, bool, float]:
    """Baselines come before methods: without one nothing can be said of a seed."""
    is_method = task.config.method != "plain"
    return task.config.seed, task.line is not None, not task.is_begun, is_method, task.seconds


def _wanted(
    experiments: Iterable[Experiment], seeds: Sequence[int]
) -> tuple[dict[Config, tuple[Measuring, ...]], list[Line]]:
    """Each run once, with all that any experiment wants to know of it; and the lines, between runs of the first seed.

    A run that is the beginning of another one is left out, unless it is to be measured. Landscapes, too, are of the
    first seed alone: each takes as long as a short training, and one is drawn.
    """
    runs: dict[Config, tuple[Measuring, ...]] = {}
    lines: dict[Line, None] = {}
    for experiment in experiments:
        for seed in seeds:
            for row in (row for row in experiment.rows if row.seeds is None or seed in row.seeds):
                config = row.config.with_seed(seed)
                asked = (m for m in row.measurements if m.kind != "landscape" or seed == seeds[0])
                runs[config] = _without_doubles((*runs.get(config, ()), *asked))
        for line in experiment.lines:
            lines[replace(line, start=line.start.with_seed(seeds[0]), end=line.end.with_seed(seeds[0]))] = None
    held = {config for config in runs if is_in_longer_runs(config) and config.to_the_end() in runs}
    return {config: asked for config, asked in runs.items() if asked or config not in held}, list(lines)


def _without_doubles(measurements: Iterable[Measuring]) -> tuple[Measuring, ...]:
    """The first of each name."""
    named: dict[str, Measuring] = {}
    for measuring in measurements:
        named.setdefault(measuring.name, measuring)
    return tuple(named.values())


def _task(
    config: Config,
    wanted: tuple[Measuring, ...],
    when_trained: tuple[Measuring, ...],
    found: Found | None,
    speeds: Speeds,
    lacks_line: bool,
) -> Task | None:
    """What is to be done for one run; None if nothing. Only weights can be measured: without them it is to train."""
    trains, missing = True, when_trained
    if found is not None and found.is_done:
        lacking = tuple(measuring for measuring in wanted if not found.has(measuring))
        if found.failure or not (lacking or (lacks_line and not found.has_weights)):
            return None
        if found.has_weights:
            trains, missing = False, lacking
    is_begun = found is not None and not found.is_done
    seconds = (speeds.training(config) if trains else 0.0) + sum(speeds.measuring(config, each) for each in missing)
    return Task(config, missing, trains=trains, seconds=seconds, is_begun=is_begun)


def _open_ends(lines: Iterable[Line], records: Records) -> set[str]:
    """Hashes of the runs at the ends of lines that are still to be measured."""
    return {end.hash for line in lines if not _is_measured(line, records) for end in (line.start, line.end)}


def _is_measured(line: Line, records: Records) -> bool:
    found = records.of(line.start)
    return found is not None and found.has(line)


def _line_tasks(lines: Iterable[Line], records: Records, speeds: Speeds, tasks: Sequence[Task]) -> list[Task]:
    """Lines between runs that have weights now or will have them; again where an end is trained again."""
    coming = {task.config.hash: task for task in tasks}

    def will_have_weights(config: Config) -> bool:
        found = records.of(config)
        return config.hash in coming or (found is not None and found.has_weights)

    made = []
    for line in lines:
        anew = any(end.hash in coming and coming[end.hash].trains for end in (line.start, line.end))
        if (anew or not _is_measured(line, records)) and all(map(will_have_weights, (line.start, line.end))):
            made.append(Task(line.start, line=line, seconds=speeds.measuring(line.start, line)))
    return made


def folder_of(out: Path, config: Config) -> Path:
    """Where a run lies: a name that a person can read, and the hash of its configuration without the seed."""
    dataset = re.sub(r"[^A-Za-z0-9]+", "-", config.dataset).strip("-")
    family = f"{config.model}-{dataset}-{config.batch_size}-{config.method}-{config.preset}"
    return out / f"{family}-{config.with_seed(0).hash}" / f"seed-{config.seed}"
