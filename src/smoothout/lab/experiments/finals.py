"""ResNet44: the best few of `choice` once more on held-out images, with seeds that had no part in choosing them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from smoothout.lab.experiments.choice import (
    FINAL_SEEDS,
    HELD_OUT,
    MEASURED_ANEW,
    OURS,
    deep_baseline,
    finalists,
    standing,
)
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import NOT_MEASURED, Experiment, Row, Setting, Verdict


def finals(setting: Setting) -> Experiment:
    setting = replace(setting, preset="ours")  # whichever is asked for: no other chooses
    rows = [deep_baseline(setting, MEASURED_ANEW), *(row for method in OURS for row in finalists(setting, method))]
    return Experiment(
        "finals",
        f"ResNet44: the best few settings once more, on {HELD_OUT:,} held-out training images",
        tuple(rows),
        notes=(
            "Accuracies here are on held-out training images, not on the test set. The rows have all seeds, the "
            f"verdicts those that every finalist of a method has (--seed 101 --seeds {FINAL_SEEDS}), so none that only "
            "`choice` had: the highest of many runs is flattered by its seed. `choice` says which preset `ours` takes.",
        ),
        judge=partial(_judge, setting),
    )


def _judge(setting: Setting, records: Records) -> tuple[Verdict, ...]:
    return tuple(verdict for method in OURS for verdict in _in_order(finalists(setting, method), records))


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
