"""Watch a run's progress: one that hangs shows where, and ends so that it can be restarted."""

import faulthandler
import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

from maxpipe.supervise.ending import leave, saying_if_possible

HUNG = 124

# Limit of a step after a request to stop, if earlier steps took less than a third of it.
_HURRIED_SECONDS = 30.0
_SLOWER = 3.0  # else this many times the slowest step before
_POLL_SECONDS = 1.0  # costs less than waking the thread at every step


class Watchdog:
    """Ends the process with exit code 124 when it has made no progress for too long.

    The stacks of all Python threads are written to standard error first. The other processes of the
    run are notified, and end as well. Inert until entered as a context manager.

    Args:
      startup_seconds: limit from `__enter__` to the first `progress`; 0 = no deadline.
      step_seconds: limit from each `progress` to the next one; 0 = no deadline.
      clock: monotonic clock, in seconds, which stops while the machine sleeps.
    """

    def __init__(
        self,
        startup_seconds: float = 0,
        step_seconds: float = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._step, self._clock = step_seconds, clock
        self._closed = threading.Event()
        self._since, self._last, self._before_step = clock(), "the start", False
        self._allowed, self._key = startup_seconds, "telemetry.startup_deadline_seconds"
        self._slowest_step = 0.0
        self._hurried_at = math.inf

    def __enter__(self) -> Self:
        self._since = self._clock()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def progress(self, what: str, *, before_step: bool = True) -> None:
        """Restart the clock after `what`, such as "step 12", which is named if the next is late.

        Unless `before_step`, an evaluation or a save comes next.
        """
        now = self._clock()
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
        self._hurried_at = min(self._hurried_at, self._clock())

    def overdue(self) -> str:
        """Return why the process hangs; "" if it does not."""
        key, allowed = self._key, self._allowed or math.inf
        if self._before_step and self._hurried_at < math.inf:
            passed = max(0.0, self._hurried_at - self._since)  # before the request
            hurried = passed + max(_HURRIED_SECONDS, _SLOWER * self._slowest_step)
            if hurried < allowed:
                key, allowed = "asked to stop", hurried
        if self._clock() - self._since <= allowed:
            return ""
        return f"nothing has happened for {allowed:.4g} s since {self._last} ({key})"

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            if reason := self.overdue():
                stream = sys.__stderr__ or sys.stderr
                with saying_if_possible():
                    what = f"\nhung: {reason}; stacks of all threads follow, exit code {HUNG}"
                    print(what, file=stream, flush=True)
                    faulthandler.dump_traceback(stream, all_threads=True)
                leave(HUNG, reason)
