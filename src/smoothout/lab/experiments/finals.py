"""ResNet44: the best few of `choice` once more on held-out images, with seeds that had no part in choosing them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from smoothout.lab.experiments.choice import (
    DECIDED_BY,
    DEEP_EPOCHS,
    FINAL_SEEDS,
    FINALISTS,
    FIRST_ROUND,
    FIRST_ROUND_SEED,
    HELD_OUT,
    MEASURED_ANEW,
    deep_baseline,
    deep_candidates,
    finalists,
    of_the_finals,
    standing,
)
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.verdicts import on_contrast
from smoothout.lab.experiments.vocabulary import NOT_MEASURED, Experiment, Row, Setting, Verdict
from smoothout.lab.methods import METHODS


def finals(setting: Setting) -> Experiment:
    setting = replace(setting, preset="ours")  # whichever is asked for: no other chooses
    rows = [*_first_round(setting), of_the_finals(deep_baseline(setting, MEASURED_ANEW, stop_after=DECIDED_BY))]
    rows += [row for method in FINALISTS for row in finalists(setting, method)]
    return Experiment(
        "finals",
        f"ResNet44: the best few settings once more, on {HELD_OUT:,} held-out training images",
        tuple(rows),
        notes=(
            "Accuracies here are on held-out training images, not on the test set. The first round, to the end, has "
            f"seed {FIRST_ROUND_SEED} beside those of `choice`. The finalists train for {DECIDED_BY} of {DEEP_EPOCHS} "
            f"epochs (`lengths` says why) with seeds {FINAL_SEEDS[0]} to {FINAL_SEEDS[-1]}, none of which had part in "
            f"choosing them: the highest of many runs is flattered by its seed (--seed {FINAL_SEEDS[0]} --seeds "
            f"{len(FINAL_SEEDS)}). `choice` says which one preset `ours` takes.",
        ),
        judge=partial(_judge, setting),
    )


def _first_round(setting: Setting) -> list[Row]:
    rows = [deep_baseline(setting, MEASURED_ANEW)]
    for method, ways in FIRST_ROUND.items():
        rows += deep_candidates(setting, method, replace(MEASURED_ANEW, ways=ways))
    return [replace(row, label=f"{row.label}, to the end", seeds=(FIRST_ROUND_SEED,)) for row in rows]


def _judge(setting: Setting, records: Records) -> tuple[Verdict, ...]:
    places = (verdict for method in FINALISTS for verdict in _in_order(finalists(setting, method), records))
    return (*places, *(_of_normalisation(setting, method, records) for method in FINALISTS))


def _of_normalisation(setting: Setting, method: str, records: Records) -> Verdict:
    """Noise on BatchNorm's parameters, too, against none there: the mean over the strengths, which both have."""
    rows = finalists(setting, method)
    too, others = ([row.config for row in rows if row.config.perturb_bn is there] for there in (True, False))
    assert len(too) == len(others), "means of as many strengths"
    configs = dict.fromkeys(config for row in rows for config in (row.config, row.versus) if config is not None)
    every = [group for config in configs if (group := records.group(config)) is not None]
    claim = (
        f"{METHODS[method].title} gains by noise on BatchNorm's parameters, too, in the mean of {len(too)} strengths"
    )
    return on_contrast(claim, too, others, records, lambda record: record.last.test_accuracy / len(too), every)


def _in_order(rows: list[Row], records: Records) -> list[Verdict]:
    """Each one's place among those of its method."""
    found = standing(rows, records)
    verdicts = []
    for row in rows:
        verdict, evidence = NOT_MEASURED, ""
        if records.diverged(row.config):
            verdict = "diverged"
        elif found is not None:
            accuracy = found.accuracies[found.rows.index(row)]
            verdict = f"{1 + sum(other > accuracy for other in found.accuracies)} of {len(found.rows)}"
            against = f"{100 * found.baseline:.2f} % of the baseline"
            evidence = f"{100 * accuracy:.2f} % against {against}, n = {len(found.seeds)}"
        verdicts.append(Verdict(f"{row.label}: its place", verdict, evidence))
    return verdicts
