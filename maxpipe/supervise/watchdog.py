"""Watch a run's progress: one that hangs shows where, and ends so that it can be restarted."""

import faulthandler
import math
import sys
import threading
import time
from typing import Self, TextIO

from maxpipe.supervise.ending import leave, saying_if_possible

HUNG = 124

# Limit of a step after a request to stop, if earlier steps took less than a third of it.
_HURRIED_SECONDS = 30.0
_SLOWER = 3.0  # else this many times the slowest step before
_POLL_SECONDS = 1.0  # so that deadlines of half an hour are not late by minutes


class Watchdog:
    """Ends the process with exit code 124 when it has made no progress for too long.

    The stacks of all Python threads are written to `stream`, or standard error, first. The clock
    stops while the machine sleeps. The other processes of the run are notified, and end as well.
    Inert until entered as a context manager.

    Args:
      startup_seconds: limit from `__enter__` to the first `progress`; 0 = no deadline.
      step_seconds: limit from each `progress` to the next one; 0 = no deadline.
      stream: file with a descriptor.
    """

    def __init__(
        self, startup_seconds: float = 0, step_seconds: float = 0, stream: TextIO | None = None
    ):
        self._startup = startup_seconds
        self._step = step_seconds
        self._stream = stream
        self._closed = threading.Event()
        self._last = "the start"
        self._before_step = False
        self._slowest_step = 0.0
        self._hurried_at = math.inf
        self._key = "telemetry.startup_deadline_seconds"
        self._since, self._allowed = time.monotonic(), startup_seconds

    def __enter__(self) -> Self:
        self._since = time.monotonic()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def progress(self, what: str, *, before_step: bool = True) -> None:
        """Restart the clock after `what`, such as "step 12", which is named if the next is late.

        Unless `before_step`, an evaluation or a save comes next.
        """
        now = time.monotonic()
        if self._before_step:
            self._slowest_step = max(self._slowest_step, now - self._since)
        # The clock first: the thread that watches must not hold old times to new limits.
        self._since = now
        self._last, self._key = what, "telemetry.step_deadline_seconds"
        self._before_step, self._allowed = before_step, self._step

    def hurry(self) -> None:
        """Give steps 30 seconds from now on, or three times the slowest one before if that is more.

        To be called when the process is asked to stop: whoever asks may not wait for the deadline.
        Evaluations, saves and the first step keep their deadlines.
        """
        self._hurried_at = min(self._hurried_at, time.monotonic())

    def _watch(self) -> None:
        shortest = min(
            (seconds for seconds in (self._startup, self._step) if seconds), default=math.inf
        )
        # Polling costs less than waking this thread at every step.
        while not self._closed.wait(min(shortest / 10, _POLL_SECONDS)):
            key, allowed = self._deadline()
            if allowed and time.monotonic() - self._since > allowed:
                self._expire(key, allowed)

    def _deadline(self) -> tuple[str, float]:
        """Return the deadline's name and its seconds since the last progress; 0 = no deadline."""
        if self._before_step and self._hurried_at < math.inf:
            passed = max(0.0, self._hurried_at - self._since)  # before the request
            hurried = passed + max(_HURRIED_SECONDS, _SLOWER * self._slowest_step)
            if not self._allowed or hurried < self._allowed:
                return "asked to stop", hurried
        return self._key, self._allowed

    def _expire(self, key: str, allowed: float) -> None:
        stream = self._stream or sys.__stderr__ or sys.stderr
        reason = f"nothing has happened for {allowed:.4g} s since {self._last} ({key})"
        with saying_if_possible():
            print(
                f"\nhung: {reason}; stacks of all threads follow, exit code {HUNG}",
                file=stream,
                flush=True,
            )
            faulthandler.dump_traceback(stream, all_threads=True)
        leave(HUNG, reason)
