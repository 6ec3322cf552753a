"""Log to a tracker in a thread of its own, so that it neither slows nor ends training."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Full, Queue
from typing import Protocol

from maxpipe.config.errors import redacted
from maxpipe.telemetry.writers import Row

CLOSE_SECONDS = 15.0  # for trackers to send what is left at the end of a run
_WAITING = 10_000  # rows of points that may wait; a tracker that cannot keep up loses some
# Attempts to send a row, for about a quarter of an hour: one that is refused must not block others.
_MOST_TRIES = 20
_LONGEST_PAUSE = 60.0  # seconds between two attempts
_SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD")


class Tracker(Protocol):
    """Where metrics are sent to; any method may raise any error.

    Attributes:
      place: where a user finds the run, for a line on the console.
    """

    place: str

    def log(self, step: int, scalars: Row) -> None:
        """Send one point for each name that has a value."""
        ...

    def close(self, *, is_done: bool) -> None:
        """Send what is left, and report whether the run has made all of its steps."""
        ...


class Background:
    """A tracker that is opened, used and closed by a thread.

    Its place and its first error are printed once, by the thread that calls `log`. A tracker that
    cannot be opened is left out; points that it does not accept are sent again.

    Args:
      name: name of the tracker, for messages.
      open_tracker: function that returns it; may take long, and may raise any error.
      print_line: function that prints a line.
      num_waiting: how many rows of points may wait.
      first_pause: seconds before a row is sent again; each further pause is twice as long.
    """

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], Tracker],
        print_line: Callable[[str], None],
        num_waiting: int = _WAITING,
        first_pause: float = 1.0,
    ):
        self._name = name
        self._open = open_tracker
        self._print_line = print_line
        self._first_pause = first_pause
        self._points: Queue[tuple[int, Row] | None] = Queue(num_waiting)  # None wakes the thread
        self._said: Queue[str] = Queue()
        self._is_done = False
        self._has_ended = threading.Event()
        self._is_left_out = threading.Event()
        self._has_failed = False
        self._num_refused = 0  # rows that a full queue has refused
        self._num_unsent = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def log(self, step: int, scalars: Row) -> None:
        """Hand points over, and return at once."""
        self._print_said()
        if self._is_left_out.is_set():
            return
        try:
            self._points.put_nowait((step, scalars))
        except Full:
            self._num_refused += 1

    def end(self, *, is_done: bool) -> None:
        """Say that there are no more points, and return at once.

        Args:
          is_done: whether the run has made all of its steps.
        """
        self._is_done = is_done
        self._has_ended.set()
        with suppress(Full):  # then the thread has points to wake up for
            self._points.put_nowait(None)

    def wait(self, until: float) -> None:
        """Wait until all is sent, or `until` of `time.monotonic`; to be called after `end`."""
        self._thread.join(max(0.0, until - time.monotonic()))
        self._print_said()
        lost = self._num_refused + self._num_unsent
        if self._thread.is_alive():
            self._warn("has not taken all points in time at the run's end")
        elif lost and not self._is_left_out.is_set():
            self._warn(f"lacks {lost:,} rows of points")

    def _run(self) -> None:
        try:
            tracker = self._open()
        except Exception as error:  # a tracker's libraries raise whatever they like
            self._say_failure(error, "training continues without it")
            self._is_left_out.set()
            return
        self._said.put(f"{self._name}: {tracker.place}")
        self._send_all(tracker)
        try:
            tracker.close(is_done=self._is_done)
        except Exception as error:
            self._say_failure(error, "it may lack the end of the run")

    def _send_all(self, tracker: Tracker) -> None:
        """Send points as they come, until the end of the run."""
        failed_in_a_row = 0
        while not (self._has_ended.is_set() and self._points.empty()):
            points = self._points.get()
            if points is None:
                continue
            if self._send(tracker, *points):
                failed_in_a_row = 0
                continue
            self._num_unsent += 1
            failed_in_a_row += 1
            # One row may be refused for its contents; after two, the tracker itself is at fault.
            if self._has_ended.is_set() and failed_in_a_row > 1:
                while not self._points.empty():
                    self._num_unsent += self._points.get() is not None

    def _send(self, tracker: Tracker, step: int, scalars: Row) -> bool:
        """Send a row, retrying after growing pauses; return whether it was accepted."""
        for attempt in range(_MOST_TRIES):
            is_last = self._has_ended.is_set()
            try:
                tracker.log(step, scalars)
            except Exception as error:
                self._say_failure(error, "training continues, and it is tried again")
            else:
                return True
            if is_last:
                break
            self._has_ended.wait(min(self._first_pause * 2**attempt, _LONGEST_PAUSE))
        return False

    def _say_failure(self, error: Exception, consequence: str) -> None:
        if not self._has_failed:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._said.put(f"warning: {self._name} has failed: {reason}; {consequence}")
        self._has_failed = True

    def _print_said(self) -> None:
        while not self._said.empty():
            self._print_line(without_secrets(self._said.get()))

    def _warn(self, what: str) -> None:
        self._print_line(f"warning: {self._name} {what}; metrics.jsonl has all")


def close_all(trackers: Sequence[Background], *, is_done: bool, seconds: float) -> None:
    """Close trackers, all at the same time, and wait for what they have not sent.

    Args:
      trackers: trackers in any state.
      is_done: whether the run has made all of its steps.
      seconds: limit of the wait for all of them together.
    """
    until = time.monotonic() + seconds
    for tracker in trackers:
        tracker.end(is_done=is_done)
    for tracker in trackers:
        tracker.wait(until)


def without_secrets(text: str) -> str:
    """Return a text without trackers' secrets, from URLs and from environment variables."""
    for name in _SECRETS:
        if secret := os.environ.get(name):
            text = text.replace(secret, "***")
    return redacted(text)
