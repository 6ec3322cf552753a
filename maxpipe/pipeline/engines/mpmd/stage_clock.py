"""Measure how long a stage is busy in a step, without the time that it waits for other stages.

All stages of a pipeline take equally long for a step, since they wait for each other; what tells a
slow stage from the others is its time without the waiting. A stage waits while arrays of another
stage that its next unit reads are missing, if that unit has been dispatched and the one before it
is finished. Delays in the process itself, such as late reading of data or late dispatch of units,
do not count as waiting.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import jax
import jax.numpy as jnp


class _Work(NamedTuple):
    since: float  # time of the dispatch, s
    arrived: jax.Array | None  # ready once arrays of other stages are here; None if none is needed
    done: jax.Array  # ready when the work is finished
    is_last: bool = False  # whether the step ends with it


class StageClock:
    """Measure the time of one stage of this process, without making the process wait.

    A thread waits for what is dispatched to the stage, in order, and notes the time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage clock")
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._steps: deque[Future[float]] = deque()  # not taken yet
        self._arrived: jax.Array | None = None
        self._begin = self._end = 0.0  # earliest begin of the next step, end of the last; s

    def will_read(self, arrays: Sequence[jax.Array]) -> None:
        """Note the arrays of other stages that the unit dispatched next reads, and may donate."""
        # The arrays themselves are gone as soon as the unit is dispatched.
        self._arrived = ready_after(arrays)

    def dispatched(self, done: jax.Array) -> None:
        """Note work of the stage, given an array that is ready when it is finished."""
        self._work.put(_Work(self._clock(), self._arrived, done))
        self._arrived = None

    def begin(self) -> None:
        """Begin a step; it counts from the end of the last one, or from `resume`."""
        if not self._begin:
            self.resume()
        self._steps.append(self._thread.submit(self._watch, self._begin))

    def resume(self) -> None:
        """Leave what happened since the last step out of the next one's time."""
        self._begin = self._clock()

    def end(self, verdict: jax.Array) -> None:
        """End the step with an array that is ready when all stages have finished their units."""
        self._work.put(_Work(self._clock(), verdict, verdict, is_last=True))

    def abandon(self) -> None:
        self._work.put(None)

    def take_seconds(self) -> float:
        """Return the seconds of the oldest step whose time was not taken yet, once it is over."""
        return self._steps.popleft().result()

    def _watch(self, earliest: float) -> float:
        """Return the seconds of a step; NaN if it is abandoned."""
        begun = last = max(earliest, self._end)
        waited = 0.0
        while (work := self._work.get()) is not None:
            # The training loop meets the same error.
            with suppress(jax.errors.JaxRuntimeError):
                if work.arrived is not None:
                    work.arrived.block_until_ready()
                    arrived = self._clock()
                    waited += max(0.0, arrived - max(last, work.since))
                work.done.block_until_ready()
            last = self._clock()
            if work.is_last:
                self._end = last
                return last - begun - waited
        return math.nan


@contextmanager
def timed(clocks: Collection[StageClock]) -> Iterator[None]:
    """Begin a step on all clocks; the context ends it on each, unless there is an error."""
    for clock in clocks:
        clock.begin()
    try:
        yield
    except BaseException:
        for clock in clocks:
            clock.abandon()
        raise


@partial(jax.jit, keep_unused=True)
def ready_after(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.zeros(())
