"""Log to a tracker in a thread of its own, so that it neither slows nor ends training."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Full, Queue
from typing import Protocol

from maxpipe.config.errors import redacted
from maxpipe.telemetry.writers import Row

CLOSE_SECONDS = 15.0  # for what is not sent yet at the end of a run
_WAITING = 10_000  # rows of points that may wait; a tracker that is so far behind loses some
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
        """Send what is left, and say whether the run has made all of its steps."""
        ...


class Background:
    """A tracker that is opened, used and closed by a thread.

    What it has to say, and its first error, are printed once, by the thread that calls `log`.

    Args:
      name: of the tracker, for messages.
      open_tracker: returns it; may take long, and may raise any error.
      print_line: prints a line.
      close_seconds: how long `close` waits.
      num_waiting: how many rows of points may wait.
    """

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], Tracker],
        print_line: Callable[[str], None],
        close_seconds: float = CLOSE_SECONDS,
        num_waiting: int = _WAITING,
    ):
        self._name = name
        self._open = open_tracker
        self._print_line = print_line
        self._close_seconds = close_seconds
        self._points: Queue[tuple[int, Row] | bool] = Queue(
            num_waiting
        )  # at last whether it is done
        self._said: Queue[str] = Queue()
        self._has_failed = threading.Event()
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def log(self, step: int, scalars: Row) -> None:
        """Hand points over, and return at once."""
        self._print_said()
        if self._has_failed.is_set():
            return
        try:
            self._points.put_nowait((step, scalars))
        except Full:
            self._lost += 1

    def close(self, *, is_done: bool) -> None:
        """Wait for what has not been sent, but not for ever."""
        until = time.monotonic() + self._close_seconds
        if not self._has_failed.is_set():
            with suppress(Full):  # then the thread does not end in time, either
                self._points.put(is_done, timeout=self._close_seconds)
        self._thread.join(max(0.0, until - time.monotonic()))
        self._print_said()
        if self._thread.is_alive():
            self._warn(f"has not taken all points {self._close_seconds:g} s after the run's end")
        elif self._lost:
            self._warn(f"was too slow for {self._lost:,} rows of points")

    def _run(self) -> None:
        try:
            tracker = self._open()
            self._said.put(f"{self._name}: {tracker.place}")
            while not isinstance(item := self._points.get(), bool):
                tracker.log(*item)
            tracker.close(is_done=item)
        except Exception as error:  # a tracker's libraries raise whatever they like
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._said.put(
                f"warning: {self._name} has failed: {reason}; training continues without it"
            )
            self._has_failed.set()

    def _print_said(self) -> None:
        while not self._said.empty():
            self._print_line(without_secrets(self._said.get()))

    def _warn(self, what: str) -> None:
        self._print_line(f"warning: {self._name} {what}, so it lacks some; metrics.jsonl has all")


def without_secrets(text: str) -> str:
    """Return a text without the secrets of trackers: those in URLs, and those of variables."""
    for name in _SECRETS:
        if secret := os.environ.get(name):
            text = text.replace(secret, "***")
    return redacted(text)
