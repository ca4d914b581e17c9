"""What is still to be done, in which order, and what it is estimated to cost."""

from dataclasses import replace
from pathlib import Path

import pytest

from smoothout.lab.config import resolve
from smoothout.lab.data.catalogue import is_here
from smoothout.lab.experiments.catalogue import EXPERIMENTS
from smoothout.lab.experiments.queue import folder_of, plan
from smoothout.lab.experiments.records import Found, Records
from smoothout.lab.experiments.speeds import START, Speeds
from smoothout.lab.experiments.vocabulary import Experiment, Line, Measuring, Row, Setting

NOISE = Measuring("sensitivity", "train", (("strengths", (0.0, 0.1)), ("draws", 1)))


def digits(**settings):
    return resolve(dataset="digits", model="mlp", **settings)


@pytest.fixture
def small():
    """Three rows of different cost, the first two with a line between them."""
    configs = [digits(epochs=epochs) for epochs in (30, 10, 20)]
    rows = tuple(Row(f"{config.epochs}", config, measurements=(NOISE,)) for config in configs)
    return Experiment("small", "", rows, (Line(configs[0], configs[1], "train", (0.0, 1.0)),))


def todo(experiment, seeds=(0,), records=None, **how):
    records = Records([]) if records is None else records
    return plan([experiment], seeds, records, Speeds(), **how)


class Measured(Found):
    """As it is wanted; no file tells how."""

    def has(self, wanted):
        return wanted.name_for(self.run.config.seed) in self.measured


def found_of(packed, config, measured=(), has_weights=True):
    """A finished run of a configuration."""
    some = packed.all()[0].run
    record = replace(some.record, config=config)
    return Measured(replace(some, config=config, record=record), frozenset(measured), has_weights)


def test_all_of_the_first_seed_comes_first_and_the_cheapest_before_the_dear(small):
    tasks = todo(small, seeds=(0, 1)).tasks
    order = [(t.config.seed, t.config.epochs, t.line is not None) for t in tasks]
    assert order == [(0, 10, 0), (0, 20, 0), (0, 30, 0), (0, 30, 1), (1, 10, 0), (1, 20, 0), (1, 30, 0)]  # one line
    assert all(task.trains and task.measurements == (NOISE,) for task in tasks if task.line is None)


def test_the_baseline_of_a_seed_comes_before_the_methods_however_dear():
    configs = [digits(epochs=1), digits(epochs=9, method="plain")]
    tasks = todo(Experiment("small", "", tuple(Row(c.hash, c) for c in configs)), seeds=(0, 1)).tasks
    assert [(t.config.seed, t.config.method) for t in tasks] == [
        *((0, "plain"), (0, "smoothout")),
        *((1, "plain"), (1, "smoothout")),
    ]


def test_a_run_that_two_experiments_want_is_one_task_with_all_its_measurements(small):
    other = Measuring("sharpness", "train", (("restarts", 1),))
    again = Experiment("again", "", (replace(small.rows[0], measurements=(other, NOISE)),))
    both = plan([small, again], (0,), Records([]), Speeds())
    assert both.runs == 3
    (task,) = [t for t in both.tasks if t.config.epochs == 30 and t.line is None]
    assert task.measurements == (NOISE, other)


def test_a_run_is_measured_for_those_who_were_not_asked_if_it_is_trained(small, packed):
    """Its weights may be gone when they are."""
    other = Measuring("sharpness", "train", (("restarts", 1),))
    first = small.rows[0].config
    elsewhere = Experiment(
        "elsewhere", "", (replace(small.rows[0], measurements=(other,)), Row("more", digits(lr=9.0)))
    )
    left = todo(small, others=[elsewhere])
    assert left.runs == 3
    assert {task.measurements for task in left.tasks if task.config == first and not task.line} == {(NOISE, other)}
    done = Records([found_of(packed, first, [NOISE.name, small.lines[0].name_for(0)], has_weights=False)])
    left = todo(small, records=done, others=[elsewhere])
    assert (left.unmeasured, {task.config.epochs for task in left.tasks}) == (0, {10, 20})
    lacking = Records([found_of(packed, first, has_weights=False)])
    (task,) = [
        t
        for t in todo(small, records=lacking, others=[elsewhere], retrain=True).tasks
        if t.config == first and t.trains
    ]
    assert task.measurements == (NOISE, other)


def test_landscapes_are_of_the_first_seed():
    row = Row("a", digits(), measurements=(NOISE, Measuring("landscape", "train", (("directions", 1), ("steps", 3)))))
    kinds = [[m.kind for m in task.measurements] for task in todo(Experiment("small", "", (row,)), seeds=(3, 4)).tasks]
    assert kinds == [["sensitivity", "landscape"], ["sensitivity"]]


def test_done_runs_are_skipped_by_their_hash(small, packed):
    first = small.rows[0].config
    records = Records([found_of(packed, first, [NOISE.name])])
    left = todo(small, records=records)
    assert (left.runs, left.done) == (3, 1)
    assert {task.config.epochs for task in left.tasks if task.line is None} == {10, 20}
    unmeasured = Records([found_of(packed, first)])
    (task,) = [t for t in todo(small, records=unmeasured).tasks if t.config == first and t.line is None]
    assert (task.trains, task.measurements) == (False, (NOISE,))


def test_records_without_weights_count_as_trained_and_are_trained_again_on_request(small, packed):
    records = Records([found_of(packed, row.config, has_weights=False) for row in small.rows])
    left = todo(small, records=records)
    assert (left.tasks, left.done, left.unmeasured) == ((), 3, 3)
    again = todo(small, records=records, retrain=True)
    assert [(t.config.epochs, t.trains, t.line is not None) for t in again.tasks] == [
        (10, True, False),
        (20, True, False),
        (30, True, False),
        (30, False, True),
    ]
    whole = Records([found_of(packed, r.config, [NOISE.name, small.lines[0].name_for(0)], False) for r in small.rows])
    assert todo(small, records=whole, retrain=True).tasks == ()


def test_what_was_begun_goes_on_first_and_what_diverged_is_done(small, packed):
    begun, diverged = small.rows[0].config, small.rows[1].config
    run = packed.all()[0].run
    records = Records(
        [
            Found(replace(run, config=begun, record=None), frozenset(), False),
            Found(replace(run, config=diverged, record=None, failure="the loss is nan"), frozenset(), False),
        ]
    )
    tasks = todo(small, records=records).tasks
    assert [task.config.epochs for task in tasks] == [30, 20]
    assert tasks[0].is_begun


def test_data_that_are_not_here_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("SMOOTHOUT_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    left = todo(EXPERIMENTS["table1"](Setting()), data_root=tmp_path)
    assert (left.tasks, left.absent) == ((), {"mnist": 6, "cifar10": 6, "cifar100": 6})
    (tmp_path / "mnist").mkdir()
    (tmp_path / "photos").mkdir()
    assert is_here("mnist")
    assert is_here("imagefolder:photos", tmp_path)
    assert not is_here("imagefolder:nothing", tmp_path)


def test_the_pack_of_c1_is_a_third_of_table_1(packed):
    left = todo(EXPERIMENTS["table1"](Setting()), seeds=range(5), records=packed)
    assert (left.runs, left.done) == (90, 30)


def test_of_two_records_of_one_run_the_more_complete_counts(packed):
    config = digits()
    poor, rich = found_of(packed, config, has_weights=False), found_of(packed, config, ["a"], has_weights=False)
    for order in ([poor, rich], [rich, poor]):
        assert Records(order).of(config) is rich
        assert len(Records(order).group(config).records) == 1


def test_folders_are_told_apart_by_their_configuration():
    one, other = digits(lr=0.1), digits(lr=0.2)
    assert folder_of(Path("out"), one) != folder_of(Path("out"), other)
    assert folder_of(Path("out"), one.with_seed(3)).name == "seed-3"
    assert folder_of(Path("out"), one.with_seed(3)).parent == folder_of(Path("out"), one).parent
    assert "/" not in folder_of(Path(), resolve(dataset="imagefolder:/a/b")).parent.name


def test_estimates_fit_what_was_timed():
    speeds = Speeds()

    def seconds(**settings):
        config = resolve(dataset="cifar10", **settings)
        return speeds.training(config) - START, config.epochs

    assert seconds(model="c1", batch_size=256)[0] == pytest.approx(7.1, rel=0.1)  # one of five side by side
    assert seconds(model="c1", batch_size=5000)[0] == pytest.approx(4.8, rel=0.1)
    whole, epochs = seconds(model="resnet44", batch_size=2048, method="plain", preset="ours")
    assert whole / epochs == pytest.approx(0.35, rel=0.1)
    cut, _ = seconds(model="resnet44", batch_size=2048, method="plain", preset="ours", stop_after=epochs // 2)
    assert cut == pytest.approx(whole / 2)
    assert seconds(model="resnet44", batch_size=128, epochs=epochs)[0] > 3 * whole  # one ghost after another
    several = seconds(model="resnet44", batch_size=2048, draws="4", epochs=epochs, preset="paper")[0]
    assert several > 1.5 * 4 * whole
    row = next(row for row in EXPERIMENTS["table1"](Setting()).rows if row.config.model == "c1")
    measured = speeds.measuring(row.config, row.measurements[0])
    assert measured == pytest.approx(9.9, rel=0.2)  # the mean of 27 runs


def test_records_of_one_process_alone_replace_the_estimate(packed):
    found = next(f for f in packed.all() if f.run.config.batch_size == 256)
    config, record = found.run.config, found.run.record

    def with_command(command):
        made_by = replace(record, provenance=replace(record.provenance, command=command), seconds=7.0)
        return Speeds(Records([replace(found, run=replace(found.run, record=made_by))])).training(config.with_seed(9))

    assert with_command("smoothout reproduce table1 --seeds 5") == START + 7.0
    table = Speeds().training(config)
    assert with_command("smoothout reproduce table1 --jobs 4") == table
    assert with_command("smoothout train") == table
