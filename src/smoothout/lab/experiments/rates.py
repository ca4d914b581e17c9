"""Whether the gain on C1 at the large batch outlives a learning rate of its own for each side; not of the paper."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from smoothout.lab.config import Config
from smoothout.lab.experiments.choice import HELD_OUT, held_out, mean_accuracy
from smoothout.lab.experiments.networks import C1, as_published, configure, label
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.verdicts import on_difference
from smoothout.lab.experiments.vocabulary import NOT_MEASURED, Experiment, Row, Setting, Verdict
from smoothout.lab.groups import FEWEST_RUNS, Group, compare, reported, sense_of

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # of the paper's rate
METHODS_COMPARED = ("plain", "smoothout")
CHOOSING_SEEDS = tuple(range(FEWEST_RUNS))  # on held-out images; on the test set those that are asked for
CLAIM = f"C1, batch {C1.large}: SmoothOut at its best rate gains over the baseline at its own"
# What `best_rates` says of the records in results/, by method: these go to the test set. The runs that choose are no
# judges of the gain, for the best of six flatters itself.
CHOSEN_RATES: dict[str, float] = {}


def rates(setting: Setting) -> Experiment:
    setting = replace(setting, preset="ours")  # the runs at the paper's rate are those of `choice` and `claims`
    rows = [
        Row(
            label(C1, C1.large, method, f", a rate of {config.lr:g}"),
            config,
            versus=None if method == "plain" else baseline,
            seeds=CHOOSING_SEEDS,
        )
        for method in METHODS_COMPARED
        for config, baseline in zip(_configs(setting, method), _configs(setting, "plain"), strict=True)
    ]
    rows += _rows_of_the_test_set(setting)
    return Experiment(
        "rates",
        "C1 at the large batch: learning rates",
        tuple(rows),
        notes=(
            f"Accuracies on {HELD_OUT:,} held-out training images where a row does not name the test set; SmoothOut "
            "with the paper's strength, each row against the baseline of its rate. Then each side has its best rate on "
            "the test set.",
        ),
        judge=partial(_judge, setting),
    )


def _configs(setting: Setting, method: str) -> list[Config]:
    usual = held_out(setting, C1, C1.large, method).lr
    return [held_out(setting, C1, C1.large, method, lr=factor * usual) for factor in FACTORS]


def _rows_of_the_test_set(setting: Setting) -> list[Row]:
    """Each side at its own rate, once both are known; the baseline first."""
    if set(CHOSEN_RATES) != set(METHODS_COMPARED):
        return []
    of = partial(configure, as_published(setting), C1, C1.large)  # at the strength at which the rates were chosen
    configs = {method: of(method, lr=CHOSEN_RATES[method]) for method in METHODS_COMPARED}
    return [
        Row(
            label(C1, C1.large, method, f", a rate of {config.lr:g}, test set"),
            config,
            versus=None if method == "plain" else configs["plain"],
        )
        for method, config in configs.items()
    ]


def _judge(setting: Setting, records: Records) -> tuple[Verdict, ...]:
    return (_judged_on_held_out_images(setting, records), _judged_on_the_test_set(setting, records))


def _judged_on_the_test_set(setting: Setting, records: Records) -> Verdict:
    claim = f"{CLAIM}, on the test set"
    rows = _rows_of_the_test_set(setting)
    if not rows:
        return Verdict(claim, NOT_MEASURED, "")
    return on_difference(claim, rows[0].config, rows[1].config, records, reported)


def _judged_on_held_out_images(setting: Setting, records: Records) -> Verdict:
    best = [_best(_configs(setting, method), records) for method in METHODS_COMPARED]
    baseline, smoothed = best
    if baseline is None or smoothed is None:
        return Verdict(CLAIM, NOT_MEASURED, "")
    gain = compare(baseline, smoothed, reported)
    points = "one run a side" if gain is None else gain.in_points()
    evidence = f"held-out images, rates {smoothed.config.lr:g} and {baseline.config.lr:g}: {points}"
    return Verdict(CLAIM, sense_of(gain), evidence)


def best_rates(setting: Setting, records: Records) -> dict[str, float]:
    """By method, as soon as every rate of both has been tried by all seeds that choose."""
    configs = {method: _configs(setting, method) for method in METHODS_COMPARED}
    if min(len(records.seeds_of(config)) for each in configs.values() for config in each) < len(CHOOSING_SEEDS):
        return {}
    best = {method: _best(each, records) for method, each in configs.items()}
    return {method: group.config.lr for method, group in best.items() if group is not None}


def _best(configs: list[Config], records: Records) -> Group | None:
    """The rate with the highest mean over the seeds that all have; one of which a run diverged is out."""
    common = records.in_common([config for config in configs if not records.diverged(config)])
    if common is None:
        return None
    groups, seeds = common
    return max(groups, key=lambda group: mean_accuracy(group, seeds))
