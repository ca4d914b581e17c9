"""What a person sees of a run: a bar on a terminal, one line an epoch elsewhere, nothing but on the first rank."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from smoothout.lab.config import Config
    from smoothout.lab.runs import EpochMetrics
    from smoothout.lab.train.checkpoint import Position

REDRAW_SECONDS = 0.2


class Progress:
    """Told of everything; shows what it likes, here nothing. Entered for as long as it shows something."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None: ...
    def say(self, text: str) -> None: ...
    def start(self, config: Config, steps_per_epoch: int, position: Position) -> None: ...
    def begin_epoch(self, epoch: int, step: int) -> None: ...
    def step(self, strength: float) -> None: ...
    def end_epoch(self, metrics: EpochMetrics) -> None: ...


class Lines(Progress):
    """One line an epoch.

    Args:
        label: what such a line begins with, where several runs share the page.
    """

    def __init__(self, label: str = "") -> None:
        self._epochs, self._judged = 0, "test"
        self._label = label

    def say(self, text: str) -> None:
        print(text, flush=True)

    def start(self, config: Config, steps_per_epoch: int, position: Position) -> None:
        self._epochs, self._judged = config.epochs_trained, judged_on(config)

    def end_epoch(self, metrics: EpochMetrics) -> None:
        what = described(metrics, self._judged)
        self.say(f"{self._label}epoch {metrics.epoch}/{self._epochs}  {what}  {metrics.seconds:.2f} s")


class TerminalBar(Progress):
    """A bar over all steps, with loss and accuracy of the last epoch, the strength now and the time that remains."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = Console() if console is None else console
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("training", total=None, shown="")
        self._epochs = self._steps = self._done = 0
        self._judged = "test"
        self._last = ""
        self._drawn = 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def start(self, config: Config, steps_per_epoch: int, position: Position) -> None:
        self._epochs, self._steps, self._judged = config.epochs_trained, steps_per_epoch, judged_on(config)
        self._bar.update(self._task, total=config.epochs_trained * steps_per_epoch)

    def begin_epoch(self, epoch: int, step: int) -> None:
        self._done = epoch * self._steps + step
        self._bar.update(self._task, description=f"epoch {epoch + 1}/{self._epochs}", completed=self._done)

    def step(self, strength: float) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._drawn > REDRAW_SECONDS:  # a redraw costs more than a step of a small network
            self._drawn = now
            shown = f"{self._last}  strength {strength:.4g}".strip()
            self._bar.update(self._task, completed=self._done, shown=shown)

    def end_epoch(self, metrics: EpochMetrics) -> None:
        self._last = f"loss {metrics.train_loss:.4f}  {self._judged} {metrics.test_accuracy:.2%}"
        shown = f"{self._last}  strength {metrics.strength:.4g}"
        self._bar.update(self._task, completed=self._done, shown=shown)


def judged_on(config: Config) -> str:
    """What accuracies are called: "test" only where they are of the test set, not of held-out training images."""
    return "held-out" if config.hold_out else "test"


def described(metrics: EpochMetrics, judged: str = "test") -> str:
    """An epoch in words and numbers."""
    smoothed = "" if metrics.smoothed_loss is None else f"  smoothed loss {metrics.smoothed_loss:.4f}"
    return (
        f"loss {metrics.train_loss:.4f}  train {metrics.train_accuracy:.2%}  "
        f"{judged} {metrics.test_accuracy:.2%} (loss {metrics.test_loss:.4f})  "
        f"lr {metrics.learning_rate:.4g}  strength {metrics.strength:.4g}{smoothed}"
    )


def progress_for(rank: int, quiet: bool = False, label: str = "") -> Progress:
    """A bar where somebody watches, lines where a file does, or where several runs (each with a label) are going on."""
    if rank or quiet:
        return Progress()
    return TerminalBar() if sys.stdout.isatty() and not label else Lines(label)
