"""Which run counts where a seed was trained more than once."""

from dataclasses import replace

from smoothout.lab.config import resolve
from smoothout.lab.experiments.records import Records


def trained(as_if_run, config, accuracy, started, measured=()):
    found = as_if_run(config, accuracy)
    record = replace(found.run.record, provenance=replace(found.run.record.provenance, started=started))
    return replace(found, run=replace(found.run, record=record), measured=frozenset(measured))


def test_training_again_lends_measurements_and_changes_no_accuracy(as_if_run):
    config = resolve(dataset="digits", model="mlp")
    first = trained(as_if_run, config, 0.8, "2026-01-01T00:00:00+00:00")
    again = trained(as_if_run, config, 0.9, "2026-01-02T00:00:00+00:00", ["sharpness-train"])
    last = trained(as_if_run, config, 0.7, "2026-01-03T00:00:00+00:00")
    for runs in ([first, again, last], [last, again, first], [again, first, last]):
        records = Records(runs)
        (record,) = records.group(config).records
        assert record.last.test_accuracy == 0.8
        (found,) = records.seeds_of(config)
        assert found.measured == {"sharpness-train"}
        assert found.run.record.last.test_accuracy == 0.9  # its own, beside its measurements
