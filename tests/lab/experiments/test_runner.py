"""The queue at work: in this process, in workers, stopped by the clock, and by the real command."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from in_process import smoothout
from smoothout.lab import packs
from smoothout.lab.config import resolve
from smoothout.lab.experiments.queue import folder_of, plan
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.runner import companions, run_queue
from smoothout.lab.experiments.speeds import Speeds
from smoothout.lab.experiments.vocabulary import Experiment, Line, Measuring, Row
from smoothout.lab.experiments.worker import Place
from smoothout.lab.runs import CHECKPOINT, LOCK, find_runs, load_run

NOISE = Measuring("sensitivity", "train", (("strengths", (0.0, 0.1)), ("draws", 1)), images=100)


def digits(**settings):
    return resolve(dataset="digits", model="mlp", batch_size=480, **settings)


def experiment(*configs, lines=()):
    return Experiment("small", "", tuple(Row(c.hash, c, measurements=(NOISE,)) for c in configs), tuple(lines))


def go_on(out, what, jobs=1, seconds=None):
    """One call: the outcomes, and what is left to do after it."""
    deadline = None if seconds is None else time.time() + seconds
    place = Place(out, device="cpu", deadline=deadline, threads=1)
    todo = plan([what], (0,), Records.read([out]), Speeds())
    outcomes = run_queue(todo.tasks, place, jobs, say=lambda line: None)
    return outcomes, plan([what], (0,), Records.read([out]), Speeds()).tasks


@pytest.mark.parametrize("jobs", [1, 2])
def test_runs_measurements_and_lines(tmp_path, jobs):
    configs = [digits(epochs=1, method=method) for method in ("plain", "smoothout")]
    what = experiment(*configs, lines=[Line(*configs, "test", (0.0, 0.5, 1.0))])
    outcomes, left = go_on(tmp_path, what, jobs)
    assert [outcome.state for outcome in outcomes] == ["done"] * 3
    assert outcomes[-1].task.line is not None
    assert left == ()
    start, end = (Records.read([tmp_path]).of(config) for config in configs)
    assert start.measured == {NOISE.name, what.lines[0].name_for(0)}
    line = start.answer(what.lines[0])
    assert line.accuracies[0] == pytest.approx(start.run.record.last.test_accuracy)
    assert line.accuracies[-1] == pytest.approx(end.run.record.last.test_accuracy)
    assert start.answer(NOISE).strengths == (0.0, 0.1)


@pytest.mark.parametrize("kept", ["checkpoint.pt", "nothing to go on from"])
def test_a_run_whose_weights_were_removed_is_trained_again_on_request(tmp_path, kept):
    config = digits(epochs=1)
    go_on(tmp_path, experiment(config))
    before, folder = load_run(folder_of(tmp_path, config)), folder_of(tmp_path, config)
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.pt")):
        if file.name != kept:
            file.unlink()
    also = Measuring("sensitivity", "test", NOISE.settings)
    what = Experiment("more", "", (Row("", config, measurements=(NOISE, also)),))
    tasks = plan([what], (0,), Records.read([tmp_path]), Speeds(), retrain=True).tasks
    (outcome,) = run_queue(tasks, Place(tmp_path, device="cpu", threads=1), say=lambda line: None)
    assert outcome.state == "done", outcome.message
    assert also.name in Records.read([tmp_path]).of(config).measured
    assert load_run(folder).record.last.test_loss == before.record.last.test_loss


class Deadly:
    """Ends the process that unpickles it."""

    def __reduce__(self):
        return os._exit, (9,)


def test_workers_that_die_before_they_read_their_task_are_failures(tmp_path):
    tasks = plan([experiment(digits(), digits(seed=1))], (0, 1), Records.read([tmp_path]), Speeds()).tasks
    outcomes = run_queue(tasks, Place(tmp_path, device="cpu", threads=Deadly()), jobs=2, say=lambda line: None)
    assert [(outcome.state, "ended without a word" in outcome.message) for outcome in outcomes] == [
        ("failed", True)
    ] * 2


def test_which_runs_train_side_by_side_on_a_gpu():
    def c1(method="plain", **settings):
        return resolve(dataset="cifar10", model="c1", method=method, batch_size=5000, **settings)

    others = [c1("smoothout"), c1("swa"), c1(stop_after=3), c1("adasmoothout"), c1("smoothout", strength=0.2)]
    seeds = [c1(seed=seed) for seed in (3, 4)]
    assert companions(c1(), [*others, *seeds]) == [*seeds, others[0], others[3]]
    assert companions(c1(epochs=3), [others[2]]) == [others[2]]  # it takes as long
    assert companions(c1("swa"), [c1("sam"), c1("swa", seed=2), c1()]) == [c1("swa", seed=2)]
    deep = [resolve(dataset="cifar10", model="resnet44", method="plain", batch_size=2048, seed=s) for s in (0, 1)]
    assert companions(deep[0], deep[1:]) == []
    assert companions(deep[0], deep[1:], together=2) == deep[1:2]
    assert companions(c1(), seeds, together=1) == []


def test_the_clock_stops_it_at_a_checkpoint_and_the_next_call_goes_on(tmp_path):
    short, long = digits(epochs=1), digits(epochs=1500)
    what = experiment(short, long)
    outcomes, left = go_on(tmp_path, what, seconds=2.5)
    assert [outcome.state for outcome in outcomes] == ["done", "out of time"]
    assert (folder_of(tmp_path, long) / CHECKPOINT).exists()
    assert [(task.config, task.is_begun) for task in left] == [(long, True)]
    before = len(load_run(folder_of(tmp_path, long)).metrics)
    assert 0 < before < 1500
    outcomes, _ = go_on(tmp_path, what, seconds=1.0)
    assert [outcome.state for outcome in outcomes] == ["out of time"]
    assert len(load_run(folder_of(tmp_path, long)).metrics) > before


def test_no_measurement_is_begun_that_would_end_too_late(tmp_path):
    config = digits(epochs=1)
    endless = Measuring("sensitivity", "train", (("strengths", (0.0, 0.1)), ("draws", 10**9)))
    what = Experiment("small", "", (Row("row", config, measurements=(endless,)),))
    ((outcome,), (left,)) = go_on(tmp_path, what, seconds=60)
    assert (outcome.state, left.trains, left.measurements) == ("out of time", False, (endless,))
    assert Records.read([tmp_path]).of(config).is_done


def test_a_loss_that_is_not_finite_is_a_result_and_the_queue_goes_on(tmp_path):
    wild, tame = digits(epochs=1, lr=1e30, method="plain"), digits(epochs=2)
    outcomes, left = go_on(tmp_path, experiment(wild, tame))
    assert [outcome.state for outcome in outcomes] == ["diverged", "done"]
    assert left == ()
    found = Records.read([tmp_path]).of(wild)
    assert "the loss is" in found.failure
    (tmp_path / "pack.jsonl").write_text(packs.pack([found.run.path], tmp_path))
    again = Records.read([], [tmp_path / "pack.jsonl"], tmp_path / "unpacked").of(wild)
    assert again.failure == found.failure


def test_a_run_that_cannot_be_made_is_named_and_the_queue_goes_on(tmp_path):
    broken, sound = digits(epochs=1, dropout=0.5), digits(epochs=2)
    outcomes, _ = go_on(tmp_path, experiment(broken, sound))
    assert [outcome.state for outcome in outcomes] == ["failed", "done"]
    assert "has no dropout" in outcomes[0].message


# ---- the command -----------------------------------------------------------------------------------------------------


TINY = ("--scale", "tiny", "--device", "cpu")


def reproduce(folder, *arguments):
    return smoothout("reproduce", *arguments, *TINY, cwd=folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Table 1 and a figure at tiny scale, in two calls: the first has no time."""
    folder = tmp_path_factory.mktemp("tiny")
    asked = ("table1", "figure8", "--models", "mlp,c1", "--out", "out", "--pack", "results/tiny.jsonl")
    command = [sys.executable, "-m", "smoothout", "reproduce", *asked, *TINY, "--minutes", "0"]
    stopped = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    return folder, asked, stopped, reproduce(folder, *asked)


def test_without_time_nothing_is_begun_and_the_exit_code_says_try_again(tiny):
    _, _, stopped, _ = tiny
    assert stopped.returncode == 75, stopped.stderr
    assert "The same command goes on from there" in stopped.stderr


def test_table_1_and_a_figure_from_nothing(tiny):
    folder, _, _, done = tiny
    assert done.returncode == 0, done.stderr
    page = Path(done.stdout.splitlines()[-1])
    assert page == folder / "out" / "index.html"
    records = Records.read([folder / "out"])
    assert len(records.all()) == 12
    assert all({"sharpness-train", "sensitivity-train"} <= found.measured for found in records.all())
    assert all(found.run.record.provenance.command.startswith("smoothout reproduce table1") for found in records.all())
    html = page.read_text()
    assert "Table 1: small and large batch on F1, C1 and C3 · preset paper · tiny scale, on the digits" in html
    assert "F1, MNIST, batch 256: baseline (here mlp on the digits, batch 48)" in html
    accuracies = [f"{100 * found.run.record.last.test_accuracy:.2f} %" for found in records.all()]
    assert all(accuracy in html for accuracy in accuracies)
    captions = re.findall("<figcaption>(.*?): ", html)
    networks = ["F1, MNIST, batch 6000", "C1, CIFAR-10, batch 5000", "C3, CIFAR-100, batch 5000"]
    assert captions == [*networks, "(a) Batch 256", "(b) Batch 5000"]
    assert "81.72 %" in html
    assert re.search(r"\(\d of \d\)", html)  # of how many sharpness converged
    assert "gap to the paper" not in re.sub(r"<p>.*?</p>", "", html)
    assert (folder / "out" / "figure8-paper-0.png").read_bytes().startswith(b"\x89PNG")


def test_the_pack_stands_for_the_runs(tiny):
    folder, _, _, _ = tiny
    lines = (folder / "results" / "tiny.jsonl").read_text().splitlines()
    assert len(lines) == 12
    (start,) = [line for line in lines if json.loads(line)["run"].startswith("c1-digits-48-plain")]
    assert "interpolation-train" in start
    elsewhere = reproduce(folder, "table1", "--models", "mlp,c1", "--out", "elsewhere")
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert elsewhere.stdout.startswith("12 runs wanted, 12 done; 0 tasks")
    assert find_runs(folder / "elsewhere") == []
    assert "tiny scale" in (folder / "elsewhere" / "index.html").read_text()


def test_a_second_call_finds_all_done_and_leaves_other_runs_in_the_pack(tiny):
    folder, asked, _, _ = tiny
    pack = folder / "results" / "tiny.jsonl"
    other = json.loads(pack.read_text().splitlines()[0])
    other["run"], other["files"]["config.json"] = "other", {**other["files"]["config.json"], "hash": "0123456789ab"}
    pack.write_text(pack.read_text() + json.dumps(other) + "\n")
    again = reproduce(folder, *asked)
    assert again.returncode == 0
    assert again.stdout.startswith("12 runs wanted, 12 done; 0 tasks")
    names = [json.loads(line)["run"] for line in pack.read_text().splitlines()]
    assert len(names) == len(set(names)) == 13
    assert "other" in names


def test_a_packed_run_keeps_what_was_measured_of_it_elsewhere(tiny):
    folder, asked, _, _ = tiny
    pack = folder / "results" / "tiny.jsonl"
    first, *others = pack.read_text().splitlines()
    richer = json.loads(first)
    richer["files"]["measurements/landscape-train.json"] = {}
    pack.write_text("\n".join([json.dumps(richer), *others]) + "\n")
    assert reproduce(folder, *asked).returncode == 0
    assert [line for line in pack.read_text().splitlines() if "landscape-train" in line] == [json.dumps(richer)]
    pack.write_text("\n".join([first, *others]) + "\n")


def test_an_earlier_training_stays_in_the_pack_beside_a_later_one(tiny):
    folder, asked, _, _ = tiny
    pack = folder / "results" / "tiny.jsonl"
    kept = pack.read_text()
    earlier = json.loads(kept.splitlines()[0])
    earlier["files"]["provenance.json"]["starts"][0]["started"] = "2001-01-01T00:00:00+00:00"
    pack.write_text(json.dumps(earlier) + "\n" + kept)
    assert reproduce(folder, *asked).returncode == 0
    assert sorted(pack.read_text().splitlines()) == sorted([json.dumps(earlier), *kept.splitlines()])
    pack.write_text(kept)


def test_a_torn_pack_is_named_and_stays(tiny, tmp_path):
    folder, asked, _, _ = tiny
    (tmp_path / "torn.jsonl").write_text('{"run": "a", "fil')
    done = reproduce(folder, *asked[:-1], str(tmp_path / "torn.jsonl"))
    assert done.returncode == 1
    assert f"{tmp_path / 'torn.jsonl'}: is not a pack of runs, or is damaged" in done.stderr
    assert (tmp_path / "torn.jsonl").read_text() == '{"run": "a", "fil'


def test_a_folder_of_results_that_is_not_there_is_named(tmp_path):
    failed = reproduce(tmp_path, "table1", "--results", "nowhere")
    assert failed.returncode == 1
    assert "there is no folder nowhere" in failed.stderr


def test_a_signal_to_the_queue_stops_its_workers_at_checkpoints(tmp_path):
    (tmp_path / "results").mkdir()
    asked = ("reproduce", "table1", "--scale", "tiny", "--models", "c1", "--seeds", "3", "--jobs", "2")
    places = ("--device", "cpu", "--out", "runs", "--results", "results")
    command = [sys.executable, "-m", "smoothout", *asked, *places]
    queue = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("runs/**/config.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    queue.send_signal(signal.SIGTERM)
    out, err = queue.communicate(timeout=120)
    assert queue.returncode == 75, err
    assert "interrupted, stopped" in out
    assert "Traceback" not in err
    assert Path(out.splitlines()[-1]).is_file()
    for run in tmp_path.glob("runs/*/*"):  # nobody holds one any more
        with (run / LOCK).open("a+") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
