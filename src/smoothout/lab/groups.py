"""Runs that differ in nothing but their seed belong together: their mean and spread, and how two groups differ."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from statistics import median

from scipy.special import stdtrit

from smoothout.lab.config import Config
from smoothout.lab.methods import METHODS
from smoothout.lab.runs import Record, Run

FEWEST_RUNS = 3  # a side, of which something can be claimed
# On a GPU two trainings of a ResNet with one seed agree for an epoch and then go their own ways (by 1.0, 0.6 and 0.3
# points in the three that were made, docs/log.md, 2026-11-18): pairs of equal seeds have nothing to compare by.
SEEDS_SAY_NOTHING = "resnet"


@dataclass(frozen=True)
class Sample:
    """n values: their mean and standard deviation (None for a single one)."""

    values: tuple[float, ...]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / self.n

    @property
    def sd(self) -> float | None:
        if self.n < 2:
            return None
        return math.sqrt(math.fsum((v - self.mean) ** 2 for v in self.values) / (self.n - 1))


@dataclass(frozen=True)
class Group:
    """The finished runs of one configuration, seed apart, in the order of their seeds.

    Args:
        config: with seed 0.
        diverged: how many more ended without a result.
        processes: that trained a run together. Each draws its own noise, so that an update averages so many draws.
    """

    config: Config
    runs: tuple[Run, ...]
    diverged: int = 0
    processes: int = 1

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(run.record for run in self.runs if run.record is not None)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(record.config.seed for record in self.records)

    def sample(self, value: Callable[[Record], float]) -> Sample:
        """A figure of every record."""
        return Sample(tuple(value(record) for record in self.records))

    @property
    def method_name(self) -> str:
        title = METHODS[self.config.method].title
        return title[0].upper() + title[1:]


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Runs that have ended by configuration: small batch first, the baseline before the methods.

    Of a seed that was trained several times, or is given twice, the training that began first counts. A group of which
    every run diverged has none.
    """
    first: dict[tuple[str, int], Run] = {}
    lost: dict[str, Config] = {}
    for run in runs:
        if run.failure and run.record is None:
            lost[run.config.hash] = replace(run.config, seed=0)
        if run.record is None:
            continue
        key = run.config.hash, run.record.provenance.processes
        if key not in first or started(run) < started(first[key]):
            first[key] = run
    diverged = Counter(config for key, config in lost.items() if not any(key == done for done, _ in first))
    by_config: dict[tuple[Config, int], list[Run]] = defaultdict(list)
    for (_, processes), run in first.items():
        by_config[replace(run.config, seed=0), processes].append(run)
    groups = [
        Group(config, tuple(sorted(members, key=lambda run: run.config.seed)), diverged[config], processes)
        for (config, processes), members in by_config.items()
    ]
    finished = {group.config for group in groups}
    groups += [Group(config, (), count) for config, count in diverged.items() if config not in finished]
    order = {method: i for i, method in enumerate(METHODS)}
    return sorted(
        groups,
        key=lambda g: (
            g.config.dataset,
            g.config.model,
            g.config.preset,
            g.config.batch_size,
            order[g.config.method],
            g.config.hash,
            g.processes,
        ),
    )


def started(run: Run) -> str:
    """When a finished run began, or its last part."""
    assert run.record is not None
    return run.record.provenance.started


@dataclass(frozen=True)
class Difference:
    """Mean of b − a with a 95 % interval, over pairs of equal seeds or between the means.

    Args:
        n: runs, on the side that has fewer.
        may_be_claimed: False where something beside this interval speaks against it.
    """

    mean: float
    low: float
    high: float
    n: int
    paired: bool
    may_be_claimed: bool = True

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0.0 or self.high < 0.0  # neither if a value is not finite

    @property
    def is_shown(self) -> bool:
        """Whether a difference may be claimed: at least three runs a side, and zero outside the interval."""
        return self.n >= FEWEST_RUNS and self.excludes_zero and self.may_be_claimed

    def in_points(self) -> str:
        """A difference of accuracies, for a sentence."""
        return f"{100 * self.mean:+.2f} points [{100 * self.low:+.2f}, {100 * self.high:+.2f}] (n = {self.n})"


@dataclass(frozen=True)
class Spread:
    """A standard deviation that several samples have in common, and its degrees of freedom."""

    sd: float
    freedom: int


def pooled(samples: Iterable[Sample]) -> Spread | None:
    """From samples whose means may differ and whose deviations are one; None if all are single values."""
    several = [(sample.n - 1, sample.sd) for sample in samples if sample.sd is not None]
    freedom = sum(n for n, _ in several)
    return Spread(math.sqrt(math.fsum(n * sd**2 for n, sd in several) / freedom), freedom) if freedom else None


def contrast(plus: Sequence[Sample], minus: Sequence[Sample], spread: Spread | None = None) -> Difference | None:
    """The sum of some means minus that of others, with its interval by Student's t.

    The error is by the spread, where one is given, else after Welch. None if a sample is a single value.
    """
    samples = (*plus, *minus)
    if min(sample.n for sample in samples) < 2:
        return None
    mean = math.fsum(sample.mean for sample in plus) - math.fsum(sample.mean for sample in minus)
    if spread is not None:
        error, freedom = spread.sd * math.sqrt(math.fsum(1 / sample.n for sample in samples)), float(spread.freedom)
    else:
        variances = [(sample.sd or 0.0) ** 2 / sample.n for sample in samples]
        error, each = math.sqrt(math.fsum(variances)), [sample.n - 1 for sample in samples]
        squares = math.fsum(variance**2 / n for variance, n in zip(variances, each))
        freedom = error**4 / squares if squares else float(sum(each))
    half = float(stdtrit(freedom, 0.975)) * error
    return Difference(mean, mean - half, mean + half, min(sample.n for sample in samples), paired=False)


def difference(a: Sequence[float], b: Sequence[float], paired: bool) -> Difference | None:
    """b − a, by Student's t: of the pairs, or after Welch. None with fewer than two values a side."""
    if not paired or min(len(a), len(b)) < 2:
        return contrast([Sample(tuple(b))], [Sample(tuple(a))])
    d = Sample(tuple(y - x for x, y in zip(a, b, strict=True)))
    half = float(stdtrit(d.n - 1, 0.975)) * (d.sd or 0.0) / math.sqrt(d.n)
    return Difference(d.mean, d.mean - half, d.mean + half, d.n, paired)


def sense_of(found: Difference | None, more: str = "holds", less: str = "the opposite") -> str:
    """A verdict on a difference: the word for more or for less, where one may be claimed."""
    if found is None or found.n < FEWEST_RUNS:
        return "too few runs"
    if not found.is_shown:
        return "no difference measured"
    return more if found.mean > 0 else less


def reported(record: Record) -> float:
    """The accuracy that counts in the record's preset: of the last epoch, in preset authors of the best."""
    return record.reported.test_accuracy


def compare(a: Group, b: Group, value: Callable[[Record], float]) -> Difference | None:
    """How a figure of group b differs from that of group a."""
    return difference(a.sample(value).values, b.sample(value).values, are_pairs(a, b))


def compare_in_study(
    plus: Sequence[Group], minus: Sequence[Group], value: Callable[[Record], float], study: Iterable[Group]
) -> Difference | None:
    """As `contrast`, with the spread that all groups of a study have in common which train as long as these.

    The spread of two or three runs says little. But spreads are not all alike: a difference is claimed only if the
    interval by the groups' own spreads excludes zero, too.
    """
    lengths = {group.config.epochs_in_words for group in (*plus, *minus)}
    spread = pooled(each.sample(value) for each in study if each.config.epochs_in_words in lengths)
    samples = [group.sample(value) for group in plus], [group.sample(value) for group in minus]
    alone, found = contrast(*samples), contrast(*samples, spread)
    return None if alone is None or found is None else replace(found, may_be_claimed=alone.excludes_zero)


def are_pairs(a: Group, b: Group) -> bool:
    """Whether the runs of two groups are compared seed by seed."""
    return a.seeds == b.seeds and not a.config.model.startswith(SEEDS_SAY_NOTHING)


def pairs(a: Group, b: Group, value: Callable[[Record], float]) -> list[float]:
    """b − a for every seed that both have."""
    before = {record.config.seed: value(record) for record in a.records}
    return [value(r) - before[r.config.seed] for r in b.records if r.config.seed in before]


def has_its_own_seconds(record: Record) -> bool:
    """Whether its time is known to be its own: others may have shared the GPU before that was noted."""
    return record.provenance.cuda is None or record.provenance.together is not None


def each_training_once(records: Iterable[Record]) -> list[Record]:
    """The records, without those that are the first epochs of another one among them."""
    longest: dict[tuple[str, str], Record] = {}
    for record in sorted(records, key=lambda record: record.config.epochs_trained):
        longest[record.config.to_the_end().hash, record.provenance.started] = record
    return list(longest.values())


def training_seconds(run: Run) -> float:
    """Epochs × the median epoch: without starting and compiling."""
    return median(metrics.seconds for metrics in run.metrics) * len(run.metrics)


@cache
def settings_that_train() -> tuple[str, ...]:
    """Names of the settings, beside the method's own, in which a method and its baseline must agree."""
    apart = ("preset", "seed", "log_smoothed_loss", "channels_last", "compile")  # none changes what is learnt
    return tuple(each.name for each in fields(Config) if each.metadata["group"] != "Method" and each.name not in apart)


def baseline_of(group: Group, groups: Iterable[Group]) -> Group | None:
    """The plain runs that differ in nothing but the method and its noise; of another preset where there are no others.

    Presets paper and ours often train alike.
    """
    alike = [other for other in groups if other.config.method == "plain" and not _differing(other, group)]
    return next((other for other in alike if other.config.preset == group.config.preset), next(iter(alike), None))


def nearest_plain(group: Group, groups: Iterable[Group]) -> tuple[Group, list[str]] | None:
    """The plain runs of the same network and data that train most alike, and the settings in which they do not."""
    same = group.config.dataset, group.config.model
    plain = [g for g in groups if g.config.method == "plain" and (g.config.dataset, g.config.model) == same]
    return min(((other, _differing(other, group)) for other in plain), key=lambda pair: len(pair[1]), default=None)


def _differing(a: Group, b: Group) -> list[str]:
    names = [name for name in settings_that_train() if getattr(a.config, name) != getattr(b.config, name)]
    return names if a.processes == b.processes else [*names, "processes"]
