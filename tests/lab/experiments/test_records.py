"""Which run counts where a seed was trained more than once."""

from dataclasses import replace

import pytest

from smoothout.lab.config import resolve
from smoothout.lab.experiments.measuring import sharpness
from smoothout.lab.experiments.queue import plan
from smoothout.lab.experiments.records import Records, look
from smoothout.lab.experiments.speeds import Speeds
from smoothout.lab.experiments.vocabulary import Experiment, Row, Setting
from smoothout.lab.groups import each_training_once
from smoothout.lab.train.start import Options, train


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


def test_a_run_that_diverged_and_was_tried_again_counts_as_what_came_of_it(as_if_run):
    config = resolve(dataset="digits", model="mlp")
    again = as_if_run(config, 0.8)
    again = replace(again, has_weights=False)
    lost = replace(again, run=replace(again.run, record=None, failure="the loss is nan"))
    for runs in ([lost, again], [again, lost]):
        assert Records(runs).diverged(config) == 0
        assert len(Records(runs).group(config).runs) == 1


@pytest.fixture(scope="module")
def whole_and_stopped(tmp_path_factory):
    """Trained for real: all four epochs, measured, and the first two of four."""
    found = []
    for stop_after in (0, 2):
        config = resolve(dataset="digits", model="mlp", method="smoothout", batch_size=500, epochs=4, seed=3)
        config = replace(config, stop_after=stop_after)
        folder = tmp_path_factory.mktemp("run")
        train(config, folder, Options(device="cpu", quiet=True))
        found.append(look(folder))
    return replace(found[0], measured=frozenset({"sharpness-train"})), found[1]


def without_seconds(epochs):
    return [replace(epoch, seconds=0.0) for epoch in epochs]


def test_the_first_epochs_of_a_run_are_the_run_that_stops_there(whole_and_stopped):
    whole, stopped = whole_and_stopped
    (cut,) = Records([whole]).seeds_of(stopped.run.config)
    assert without_seconds(cut.run.metrics) == without_seconds(stopped.run.metrics)
    ours, real = cut.run.record, stopped.run.record
    assert without_seconds([ours.last, ours.best]) == without_seconds([real.last, real.best])
    assert ours.config == real.config == cut.run.config
    later = [epoch.seconds for epoch in whole.run.metrics[2:]]
    assert ours.seconds == pytest.approx(whole.run.record.seconds - sum(later))
    assert not cut.measured
    assert not cut.has_weights


def at(found, started, accuracy):
    """The same run, begun at another time, with this accuracy in all of its epochs."""
    epochs = tuple(replace(epoch, test_accuracy=accuracy) for epoch in found.run.metrics)
    provenance = replace(found.run.record.provenance, started=started)
    record = replace(found.run.record, provenance=provenance, last=epochs[-1], best=epochs[0])
    return replace(found, run=replace(found.run, metrics=epochs, record=record))


def test_of_a_run_that_stopped_and_one_that_is_cut_the_accuracy_is_the_first_ones(whole_and_stopped):
    whole, stopped = whole_and_stopped
    early, late = "2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00"
    for first, second in (((whole, 0.1), (stopped, 0.2)), ((stopped, 0.3), (whole, 0.4)), ((whole, 0.5), (whole, 0.6))):
        runs = [at(first[0], early, first[1]), at(second[0], late, second[1])]
        for given in (runs, runs[::-1]):
            (record,) = Records(given).group(stopped.run.config).records
            assert (record.last.test_accuracy, record.last.epoch) == (first[1], 2)


def test_nothing_is_cut_out_of_a_run_that_did_not_end(whole_and_stopped):
    whole, stopped = whole_and_stopped
    unfinished = replace(whole, run=replace(whole.run, record=None))
    lost = replace(whole, run=replace(whole.run, record=None, failure="the loss is nan"))
    for found in (unfinished, lost):
        assert Records([found]).of(stopped.run.config) is None
        assert Records([found]).seeds_of(stopped.run.config) == []
    stopped_lost = replace(stopped, run=replace(stopped.run, record=None, failure="the loss is nan"))
    assert Records([whole, stopped_lost]).diverged(stopped.run.config) == 1


def test_a_run_that_stopped_is_not_replaced_by_one_that_is_cut(whole_and_stopped):
    whole, stopped = whole_and_stopped
    both = Records([whole, stopped])
    assert both.of(stopped.run.config) is stopped
    assert both.of(whole.run.config) is whole
    assert len(both.all()) == 2
    begun = replace(stopped, run=replace(stopped.run, record=None))
    assert Records([begun]).of(stopped.run.config) is begun
    assert Records([begun, whole]).of(stopped.run.config).run.record is not None


def test_nothing_is_trained_that_can_be_cut(whole_and_stopped):
    whole, stopped = whole_and_stopped
    experiment = Experiment("some", "Some", (Row("stopped", stopped.run.config.with_seed(0)),))
    assert plan([experiment], [3], Records([]), Speeds()).tasks
    assert not plan([experiment], [3], Records([whole]), Speeds()).tasks
    both = replace(experiment, rows=(*experiment.rows, Row("whole", whole.run.config.with_seed(0))))
    (task,) = plan([both], [3], Records([]), Speeds()).tasks
    assert not task.config.stop_after
    measured = replace(experiment.rows[0], measurements=(sharpness(Setting("tiny"), "mlp"),))
    assert len(plan([replace(both, rows=(measured, *both.rows))], [3], Records([]), Speeds()).tasks) == 2


@pytest.mark.parametrize("settings", [{"remeasure_bn": "clean"}, {"method": "ema"}])
def test_what_is_judged_otherwise_at_the_end_is_not_cut(as_if_run, settings):
    config = resolve(**{"dataset": "digits", "model": "f1", "method": "smoothout", "epochs": 4, **settings})
    assert Records([as_if_run(config, 0.9)]).of(replace(config, stop_after=2)) is None
    alike = replace(config, remeasure_bn="no", method="plain", strength=0.0)
    assert Records([as_if_run(alike, 0.9)]).of(replace(alike, stop_after=2)) is not None


def test_time_is_counted_once_of_a_run_and_its_beginning(whole_and_stopped):
    whole, stopped = whole_and_stopped
    records = Records([whole])
    both = [records.of(each.run.config).run.record for each in (whole, stopped)]
    both.append(records.of(replace(stopped.run.config, stop_after=3)).run.record)
    for given in (both, both[::-1]):
        assert each_training_once(given) == [whole.run.record]
        assert each_training_once(record for record in given if record.config.stop_after) == [both[2]]
    assert each_training_once([both[1]]) == [both[1]]
    later = replace(stopped.run.record.provenance, started="2100-01-01T00:00:00+00:00")
    assert len(each_training_once([whole.run.record, replace(stopped.run.record, provenance=later)])) == 2
