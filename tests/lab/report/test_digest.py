"""The tables in short: what has too few runs, or none that ended, is no line."""

from dataclasses import replace

import pytest

from smoothout.lab.config import resolve
from smoothout.lab.experiments.networks import C1, configure
from smoothout.lab.experiments.records import Records, look
from smoothout.lab.experiments.table1 import table1
from smoothout.lab.experiments.vocabulary import Setting
from smoothout.lab.report.digest import digest
from smoothout.lab.runs import load_run
from smoothout.lab.train.start import Options, train


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Runs of C1 by method, accuracies and how many more diverged: made of one run on the digits."""
    folder = tmp_path_factory.mktemp("digest") / "run"
    train(resolve(model="mlp", epochs=1, batch_size=400), folder, Options(device="cpu", quiet=True))
    run, there = load_run(folder), look(folder)

    def made(method, accuracies, diverged=0):
        for seed in range(len(accuracies) + diverged):
            config = configure(Setting(), C1, C1.large, method).with_seed(seed)
            if seed < len(accuracies):
                last = replace(run.record.last, test_accuracy=accuracies[seed])
                record, failure = replace(run.record, config=config, last=last), ""
            else:
                record, failure = None, "the loss is nan"
            yield replace(there, run=replace(run, config=config, record=record, failure=failure))

    return made


def lines(*runs):
    return digest([(Setting(), table1(Setting()))], Records(run for each in runs for run in each)).rows


def test_a_line_has_the_change_and_what_diverged(found):
    plain = found("plain", (0.700, 0.701, 0.702))
    (line,) = lines(plain, found("smoothout", (0.720, 0.721, 0.722)), found("adasmoothout", (0.71, 0.72, 0.73), 1))
    assert [cell.text for cell in line.cells[1:3]] == ["3", "70.10 ± 0.10 %"]
    assert line.cells[3].text == "72.10 ± 0.10 %: +2.00 [+2.00, +2.00]"
    assert line.cells[3].tone == "good"
    assert line.cells[4].text.endswith(", 1 more diverged")
    assert line.cells[4].tone == ""


def test_without_three_runs_of_the_baseline_there_is_no_line(found):
    assert lines(found("plain", (0.7, 0.7)), found("smoothout", (0.72, 0.73, 0.74))) == ()
    assert lines(found("plain", (), 3), found("smoothout", (0.72, 0.73, 0.74))) == ()
    (line,) = lines(found("plain", (0.7, 0.7, 0.7)), found("smoothout", (), 2))
    assert [cell.text for cell in line.cells[3:]] == ["2 runs diverged", "–"]


def test_nothing_is_claimed_beside_a_baseline_of_which_a_run_diverged(found):
    (line,) = lines(found("plain", (0.700, 0.701, 0.702), 1), found("smoothout", (0.720, 0.721, 0.722)))
    assert line.cells[3].tone == ""
