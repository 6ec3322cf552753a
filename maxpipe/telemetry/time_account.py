"""Where the wall-clock time of a process goes, and how much of it moved the run forward."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from maxpipe.telemetry.console import format_seconds

PHASES = ("init", "compile", "data", "step", "checkpoint", "evaluation")
COMPILE_EVENTS = "/jax/core/compile/"  # tracing, lowering, and XLA or the compilation cache


class TimeAccount:
    """Seconds per phase; every moment since the account was opened belongs to exactly one.

      init        until the first step is asked for
      compile     tracing and compiling, wherever JAX does it
      data        waiting for a batch
      step        steps, and everything that has no phase of its own
      checkpoint  what a save keeps the loop from doing, and at the end waiting for its commit
      evaluation  on held-out data

    As a context manager it hears from JAX about compilations; otherwise they count as the phase
    they are in.

    Args:
      clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._phase = "init"
        self._since = clock()
        self._compiled: list[tuple[float, float]] = []
        self._thread = (
            threading.current_thread()
        )  # what others compile does not keep this one waiting

    def __enter__(self) -> Self:
        import jax

        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        import jax

        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def enter(self, phase: str) -> None:
        """Ends the current phase and begins another."""
        assert phase in PHASES
        now = self._clock()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """A phase inside another."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def compiled(self, seconds: float) -> None:
        """Moves the last `seconds` from the current phase to `compile`, but for those that are there already.

        JAX reports a compilation when it ends, and so those inside another one before it.
        """
        start = self._clock() - seconds
        inside = 0.0
        while self._compiled and self._compiled[-1][0] >= start:
            inside += self._compiled.pop()[1]
        self._compiled.append((start, seconds))
        self._seconds["compile"] += seconds - inside
        self._seconds[self._phase] -= seconds - inside

    def seconds(self) -> dict[str, float]:
        """Phase -> seconds up to now."""
        self.enter(self._phase)
        return dict(self._seconds)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith(COMPILE_EVENTS) and threading.current_thread() is self._thread:
            self.compiled(duration_secs)


def goodput_row(seconds: Mapping[str, float], lost: float) -> dict[str, float]:
    """The account of a process as values for `metrics.jsonl`.

    Args:
      seconds: from `TimeAccount.seconds`.
      lost: seconds that an earlier process spent on steps after its last checkpoint.

    Returns:
      `seconds_in_<phase>` for each phase, `seconds_lost`, and `goodput`: the steps' share of all of
      them.
    """
    total = sum(seconds.values()) + lost
    named = {f"seconds_in_{phase}": value for phase, value in seconds.items()}
    return {**named, "seconds_lost": lost, "goodput": seconds["step"] / total if total > 0 else 0.0}


def goodput_line(row: Mapping[str, float]) -> str:
    """`goodput_row` as a line for people."""
    parts = [f"{phase} {_duration(row[f'seconds_in_{phase}'])}" for phase in PHASES]
    if row["seconds_lost"]:
        parts.append(f"lost before this start {_duration(row['seconds_lost'])}")
    return f"goodput {100 * row['goodput']:.1f} %: {', '.join(parts)}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else format_seconds(seconds)
