"""Whether measuring statistics anew changes what Table 1 says: both sides are measured, and runs tell both ways."""

from dataclasses import replace

from smoothout.lab.experiments.batchnorm import batchnorm
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.table1 import table1
from smoothout.lab.experiments.vocabulary import Setting


def test_rows_are_those_of_table_1_measured_anew_on_both_sides():
    rows = batchnorm(Setting("paper", "ours")).rows  # whichever is asked for: the paper's strengths
    assert {config.remeasure_bn for row in rows for config in (row.config, row.versus or row.config)} == {"clean"}
    theirs = {row.label: row.config for row in table1(Setting()).rows}
    assert len(rows) == 12
    assert all(replace(row.config, remeasure_bn="no") == theirs[row.label] for row in rows)


def test_a_verdict_on_every_row_that_has_runs(as_if_run):
    experiment, runs = batchnorm(Setting()), []
    row = next(row for row in experiment.rows if row.config.method == "smoothout")
    for seed in range(3):
        found = as_if_run(row.config.with_seed(seed), 0.92)
        before = {"test_loss": 0.3, "test_accuracy": 0.91 - 1e-4 * seed}
        runs.append(replace(found, run=replace(found.run, record=replace(found.run.record, as_trained=before))))
    (said,) = experiment.judge(Records(runs))
    assert (said.claim.startswith(row.label), said.verdict) == (True, "holds")
    assert said.evidence.startswith("+1.01 points [")
