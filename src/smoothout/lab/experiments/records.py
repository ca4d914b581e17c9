"""What has been run already: run folders and packs of records, found by configuration."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smoothout.lab import measurements, packs
from smoothout.lab.config import Config
from smoothout.lab.experiments.vocabulary import Line, Measuring
from smoothout.lab.groups import Group, started
from smoothout.lab.presets import MEASURE_STATISTICS_ANYWAY
from smoothout.lab.runs import LAST_WEIGHTS, Run, best_of, find_runs, load_run


@dataclass(frozen=True)
class Found:
    """A run that is there: finished, begun, or ended by a loss that was not finite (`failure` says how)."""

    run: Run
    measured: frozenset[str]
    has_weights: bool

    @property
    def failure(self) -> str:
        return self.run.failure

    @property
    def is_done(self) -> bool:
        return self.run.record is not None or bool(self.failure)

    def has(self, wanted: Measuring | Line) -> bool:
        """Whether this was measured, with these settings."""
        return self.answer(wanted) is not None

    def answer(self, wanted: Measuring | Line) -> Any:
        """The result of a measurement; None if it was not made, or with other settings."""
        name = wanted.name_for(self.run.config.seed)
        if name not in self.measured or self.run.record is None:
            return None
        there = measurements.load(self.run.path, name)
        return there.result if wanted.is_answered_by(there, self.run.record.images(wanted.split)) else None


class Records:
    """Runs by configuration hash.

    A seed may have been trained twice, the second time to be measured, and on a GPU the two differ. One run then stands
    for the seed: that with weights, else that with most measurements. But in a group its epochs are those of the
    training that began first, so that training again changes no accuracy.

    A run that is to stop early need not be made where another went on: the first epochs of that one are it (on a GPU
    the last of them is judged by fused layers, which differ by rounding).
    """

    def __init__(self, runs: Iterable[Found]) -> None:
        self._by_hash: dict[str, Found] = {}
        self._finished: dict[str, list[Run]] = defaultdict(list)
        self._seeds: dict[str, list[Found]] = defaultdict(list)
        for found in runs:
            key = found.run.config.hash
            if key not in self._by_hash or _worth(found) > _worth(self._by_hash[key]):
                self._by_hash[key] = found
            if found.run.record is not None:
                self._finished[key].append(found.run)
        for found in self._by_hash.values():
            self._seeds[found.run.config.with_seed(0).hash].append(found)

    @classmethod
    def read(cls, folders: Sequence[Path], pack_files: Sequence[Path] = (), unpack_into: Path | None = None) -> Records:
        """All runs below folders and in packs.

        Args:
            unpack_into: where packs are unpacked; it must stay for as long as measurements are read.
        """
        found = [look(path) for path in find_runs(*folders)]
        for number, file in enumerate(pack_files):
            assert unpack_into is not None
            folder = unpack_into / str(number)
            with packs.named_by(file, folder):
                found += [look(path) for path in packs.unpack(file, folder)]
        return cls(found)

    def of(self, config: Config) -> Found | None:
        """The run of this configuration, seed included."""
        found = self._by_hash.get(config.hash)
        return found if found is not None and found.is_done else self._cut_out(config) or found

    def all(self) -> list[Found]:
        """Everything that is there, nothing of it cut."""
        return list(self._by_hash.values())

    def seeds_of(self, config: Config) -> list[Found]:
        """Every run of a configuration, seed apart, in the order of seeds."""
        config = config.with_seed(0)
        there = {found.run.config.seed: found for found in self._seeds.get(config.hash, [])}
        for whole in self._seeds.get(config.to_the_end().hash, []) if config.stop_after else []:
            seed = whole.run.config.seed
            if (found := self.of(config.with_seed(seed))) is not None:
                there[seed] = found
        return [there[seed] for seed in sorted(there)]

    def group(self, config: Config) -> Group | None:
        """The finished runs of a configuration, seed apart; None if there are none."""
        runs = [self._as_first_trained(found.run) for found in self.seeds_of(config) if found.run.record is not None]
        return Group(config.with_seed(0), tuple(runs)) if runs else None

    def in_common(self, configs: Sequence[Config]) -> tuple[list[Group], set[int]] | None:
        """The finished runs of all these, and the seeds that all of them have; None without such a seed."""
        groups = [group for config in configs if (group := self.group(config)) is not None]
        seeds = set.intersection(*(set(group.seeds) for group in groups)) if groups else set()
        return (groups, seeds) if seeds and len(groups) == len(configs) else None

    def _cut_out(self, config: Config) -> Found | None:
        """The beginning of a finished run that went on; None where there is none. Nothing was measured of it."""
        whole = self._by_hash.get(config.to_the_end().hash) if is_in_longer_runs(config) else None
        if whole is None or whole.run.record is None:
            return None
        run = _first_epochs(self._as_first_trained(whole.run), config.stop_after)
        return Found(run, measured=frozenset(), has_weights=False)

    def _as_first_trained(self, run: Run) -> Run:
        cut = self._cut_out(run.config)
        trainings = [*self._finished.get(run.config.hash, ()), *([] if cut is None else [cut.run])]
        first = min(trainings, key=started)
        return replace(run, metrics=first.metrics, record=first.record)

    def diverged(self, *configs: Config) -> int:
        """How many runs of these configurations, seed apart, ended without a result."""
        return sum(bool(found.failure) for config in configs for found in self.seeds_of(config))


def is_in_longer_runs(config: Config) -> bool:
    """Whether a run stops early, and its end is judged as any epoch is: one that goes on holds it."""
    is_judged_alike = config.remeasure_bn == "no" and config.method not in MEASURE_STATISTICS_ANYWAY
    return bool(config.stop_after) and is_judged_alike


def _first_epochs(run: Run, number: int) -> Run:
    """A finished run as `--stop-after` would have ended it."""
    assert run.record is not None
    config, metrics = replace(run.config, stop_after=number), run.metrics[:number]
    record = replace(
        run.record,
        config=config,
        last=metrics[-1],
        best=best_of(metrics),
        seconds=run.record.seconds - math.fsum(epoch.seconds for epoch in run.metrics[number:]),
    )
    return replace(run, config=config, metrics=metrics, record=record)


def look(path: Path) -> Found:
    """A run folder as it is now."""
    measured = frozenset(file.stem for file in (path / measurements.FOLDER).glob("*.json"))
    return Found(load_run(path), measured, (path / LAST_WEIGHTS).exists())


def _worth(found: Found) -> tuple[bool, bool, bool, int]:
    """One that diverged and was tried again counts as what came of it."""
    return found.is_done, found.run.record is not None, found.has_weights, len(found.measured)
