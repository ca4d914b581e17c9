"""Requests to stop: SIGINT, SIGTERM and a time budget. The step is finished, a checkpoint made, training ends."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType

from smoothout.lab.train.processes import started_by_torchrun

TIME_IS_UP = 64  # larger than any signal, and not one
TRY_AGAIN = 75  # EX_TEMPFAIL


class Interrupted(Exception):
    """Training stopped because it was asked to, at a checkpoint."""

    def __init__(self, code: int, where: str) -> None:
        reason = "the time budget is spent" if code == TIME_IS_UP else signal.Signals(code).name
        super().__init__(f"stopped {where} ({reason}). The same command goes on from there.")
        self.exit_code = TRY_AGAIN if code == TIME_IS_UP else 128 + code


def check_minutes(minutes: float) -> float:
    """A time budget, if it is one."""
    if not minutes >= 0:  # nor is what is not a number
        raise ValueError(f"minutes={minutes}: give a time budget of 0 or more")
    return minutes


class StopRequest:
    """Remembers the first signal; the second one has its usual effect, so that nobody is kept waiting.

    Args:
        minutes: a time budget; None: none.
    """

    def __init__(self, minutes: float | None = None) -> None:
        self._signal = 0
        self._deadline = None if minutes is None else time.monotonic() + 60 * check_minutes(minutes)
        self._before: dict[int, object] = {}

    @property
    def code(self) -> int:
        """0, the number of a signal, or TIME_IS_UP."""
        if self._signal:
            return self._signal
        return TIME_IS_UP if self._deadline is not None and time.monotonic() >= self._deadline else 0

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore_handlers()

    def _received(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        # torchrun passes a Ctrl-C on that the terminal has sent already: under it repeats mean nothing.
        if not started_by_torchrun():
            self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyrefly: ignore[bad-argument-type]
        self._before = {}
