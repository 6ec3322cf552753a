"""`checkpoint.every_minutes`: whether the last save is long ago, by one clock for all processes."""

import time
from collections.abc import Callable

from maxpipe.checkpoint import processes


class Interval:
    """Whether so many seconds have passed; every process gets the same answer.

    Clocks differ between machines, and so does the moment at which each of them asks: process 0 decides.

    Args:
      seconds: length of the interval; 0 = it is never over.
      clock: seconds, never going back.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._seconds = seconds
        self._clock = clock
        self._since = clock()

    def restart(self) -> None:
        """The interval begins now."""
        self._since = self._clock()

    def is_over(self) -> bool:
        """Whether it is over; with several processes all of them ask."""
        if not self._seconds:
            return False
        return bool(processes.of_first_process(int(self._clock() - self._since >= self._seconds)))
