"""What a person sees."""

import io

import pytest
from rich.console import Console

from smoothout.lab.config import resolve
from smoothout.lab.runs import EpochMetrics
from smoothout.lab.train.checkpoint import Position
from smoothout.lab.train.progress import Lines, Progress, TerminalBar, progress_for
from smoothout.lab.train.trackers import Tracker

METRICS = EpochMetrics(1, 4, 0.51234, 0.8, 0.6, 0.875, 0.1, 0.0375, 4.0, 0.7, 1.25)


def show(progress, **settings):
    with progress:
        progress.start(resolve(epochs=3, **settings), steps_per_epoch=4, position=Position())
        progress.begin_epoch(0, 0)
        for _ in range(4):
            progress.step(0.0375)
        progress.end_epoch(METRICS)


def test_a_terminal_has_a_bar_with_epoch_loss_accuracy_strength_and_eta():
    screen = io.StringIO()
    show(TerminalBar(Console(file=screen, force_terminal=True, width=160, color_system=None)))
    drawn = [line for line in screen.getvalue().splitlines() if "loss" in line]
    for part in ("epoch 1/3", "loss 0.5123", "test 87.50%", "strength 0.0375", "ETA"):
        assert part in drawn[-1]


def test_elsewhere_one_line_an_epoch(capsys):
    show(Lines())
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        "epoch 1/3  loss 0.5123  train 80.00%  test 87.50% (loss 0.6000)  lr 0.1  strength 0.0375  "
        "smoothed loss 0.7000  1.25 s"
    )


def test_a_run_that_stops_early_is_done_there(capsys):
    show(Lines(), stop_after=2)
    assert capsys.readouterr().out.startswith("epoch 1/2  ")
    screen = io.StringIO()
    bar = TerminalBar(Console(file=screen, force_terminal=True, width=160, color_system=None))
    show(bar, stop_after=2)
    assert "epoch 1/2" in screen.getvalue()
    assert bar._bar.tasks[0].total == 2 * 4


@pytest.mark.parametrize(("rank", "quiet", "kind"), [(0, False, Lines), (1, False, Progress), (0, True, Progress)])
def test_only_the_first_rank_speaks(rank, quiet, kind, capsys):
    progress = progress_for(rank, quiet)  # under pytest the output is no terminal
    assert type(progress) is kind
    show(progress)
    assert bool(capsys.readouterr().out) == (kind is Lines)


def test_null_objects_take_everything():
    Tracker().log(METRICS)
    Tracker().close()
    Progress().say("nothing")
