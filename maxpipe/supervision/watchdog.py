"""Watch a run's progress: one that hangs shows where, and ends so that it can be restarted."""

import faulthandler
import sys
import threading
import time
from typing import Self, TextIO

from maxpipe.supervision.ending import leave

HUNG = 124


class Watchdog:
    """Ends the process with exit code 124 when it has made no progress for too long.

    The stacks of all Python threads are written to standard error first. The clock stops while the
    machine sleeps. Inert until entered as a context manager, and without deadlines.

    Args:
      startup_seconds: from `__enter__` to the first `progress`; 0 = no deadline.
      step_seconds: from each `progress` to the next one; 0 = no deadline.
      stream: where the stacks are written, with a file descriptor; standard error if None.
    """

    def __init__(
        self, startup_seconds: float = 0, step_seconds: float = 0, stream: TextIO | None = None
    ):
        self._startup = startup_seconds
        self._step = step_seconds
        self._stream = stream
        self._closed = threading.Event()
        self._last = "the start"
        self._key = "telemetry.startup_deadline_seconds"
        self._since, self._allowed = time.monotonic(), startup_seconds

    def __enter__(self) -> Self:
        self._since = time.monotonic()
        if self._startup or self._step:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def progress(self, what: str) -> None:
        """Restart the clock.

        Args:
          what: what has just been finished, such as "step 12"; the message of an expired deadline
            names it.
        """
        self._last, self._key = what, "telemetry.step_deadline_seconds"
        self._since, self._allowed = time.monotonic(), self._step

    def _watch(self) -> None:
        shortest = min(seconds for seconds in (self._startup, self._step) if seconds)
        # Polling, late by at most a tenth, costs less than waking this thread at every step.
        while not self._closed.wait(shortest / 10):
            if self._allowed and time.monotonic() - self._since > self._allowed:
                self._expire()

    def _expire(self) -> None:
        stream = self._stream or sys.__stderr__ or sys.stderr
        print(
            f"\nhung: nothing has happened for {self._allowed:g} s since {self._last} "
            f"({self._key}); "
            f"stacks of all threads follow, exit code {HUNG}",
            file=stream,
            flush=True,
        )
        faulthandler.dump_traceback(stream, all_threads=True)
        leave(HUNG)
