"""Account for the time of a run by phases, with goodput, and trace a few steps."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from maxpipe.telemetry.console import format_seconds
from maxpipe.telemetry.sink import REQUIRED, TelemetryError

PHASES = ("init", "restore", "compile", "data", "step", "checkpoint", "evaluation")
DOWNTIME = ("detection", "restart")  # what a process knows that a supervisor has started again
SHORT_SECONDS = 600.0  # the share of steps of a shorter process says nothing yet
COMPILE_EVENTS = "/jax/core/compile/"  # tracing, lowering, and XLA or the compilation cache


class TimeAccount:
    """Seconds per phase; every moment since the account was opened belongs to exactly one.

      init        before the first step
      restore     reading and verifying a checkpoint
      compile     tracing and compiling, in whatever phase JAX does it
      data        waiting for a batch
      step        steps, and everything that has no phase of its own
      checkpoint  the part of a save for which the loop waits, and the wait for the last commit
      evaluation  on held-out data

    As a context manager it listens to JAX for compilations. Outside of the context, a compilation
    counts towards the phase during which it happens.

    Args:
      clock: monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._phase = "init"
        self._since = clock()
        self._compilations: list[tuple[float, float]] = []  # (start, seconds), without nested ones
        self._thread = threading.current_thread()

    def __enter__(self) -> Self:
        import jax

        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        import jax

        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def enter(self, phase: str) -> None:
        """End the current phase and begin another."""
        assert phase in PHASES
        now = self._clock()
        self._seconds[self._phase] += now - self._since
        self._phase = phase
        self._since = now

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Enter a phase, and return to the current one at the end of the context."""
        outer = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer)

    def compiled(self, seconds: float) -> None:
        """Move the last `seconds` from the current phase to `compile`, each only once.

        JAX reports a compilation when it ends, so a nested one is reported before its outer one.
        """
        start = self._clock() - seconds
        nested = 0.0
        while self._compilations and self._compilations[-1][0] >= start:
            nested += self._compilations.pop()[1]
        self._compilations.append((start, seconds))
        self._seconds["compile"] += seconds - nested
        self._seconds[self._phase] -= seconds - nested

    def seconds(self) -> dict[str, float]:
        """Return phase -> seconds up to now."""
        self.enter(self._phase)
        return dict(self._seconds)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        # The loop does not wait for what other threads compile.
        if event.startswith(COMPILE_EVENTS) and threading.current_thread() is self._thread:
            self.compiled(duration_secs)


def goodput_row(
    seconds: Mapping[str, float], lost: float, down: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the account of a process as values for `metrics.jsonl`.

    Args:
      seconds: phase -> seconds, from `TimeAccount.seconds`.
      lost: seconds that an earlier process spent on steps after its last checkpoint.
      down: seconds in which no process of the run worked before this one began, by cause.

    Returns:
      `seconds_in_<phase>` for each phase and cause, `seconds_lost`, and `goodput`: the share of
      steps in the sum of all of them.
    """
    down = down or {}
    total = sum(seconds.values()) + sum(down.values()) + lost
    phases = {f"seconds_in_{phase}": value for phase, value in {**seconds, **down}.items()}
    goodput = seconds["step"] / total if total > 0 else 0.0
    return {**phases, "seconds_lost": lost, "goodput": goodput}


def goodput_line(row: Mapping[str, float]) -> str:
    """Return `goodput_row` as a line of text, without the share while starting dominates it."""
    shown = [phase for phase in PHASES if phase != "restore" or row["seconds_in_restore"]]
    shown += [cause for cause in DOWNTIME if f"seconds_in_{cause}" in row]
    parts = [f"{phase} {_duration(row[f'seconds_in_{phase}'])}" for phase in shown]
    if row["seconds_lost"]:
        parts.append(f"steps repeated {_duration(row['seconds_lost'])}")
    if sum(row[f"seconds_in_{phase}"] for phase in PHASES) < SHORT_SECONDS:
        return f"time spent: {', '.join(parts)}"
    return f"goodput {100 * row['goodput']:.1f} %: {', '.join(parts)}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else format_seconds(seconds)


class Profiler:
    """Traces the steps from first to last, both included, for TensorBoard's or Perfetto's viewer.

    The loop calls `before` and `after` around every step, `after` once the step's results are
    available, and `close` however it ends. A run that resumes or ends inside the window traces only
    the steps of the window that it makes.

    Args:
      profile_steps: `telemetry.profile_steps`: [first, last], counted from 1; empty = no trace.
      directory: where JAX writes `plugins/profile/...`; every process writes its own files.
      is_required: `telemetry.required`: whether a trace that cannot be written ends the run.
      print_line: function that prints a line.
    """

    def __init__(
        self,
        profile_steps: Sequence[int],
        directory: Path,
        *,
        is_required: bool = False,
        print_line: Callable[[str], None] = print,
    ):
        self._window = range(profile_steps[0], profile_steps[1] + 1) if profile_steps else range(0)
        self._directory = directory
        self._is_required = is_required
        self._print_line = print_line
        self._is_tracing = False

    def before(self, step: int) -> None:
        """Start a trace if `step` is in the window."""
        if step in self._window and not self._is_tracing:
            import jax

            with self._reported():
                jax.profiler.start_trace(str(self._directory))
                self._is_tracing = True

    def after(self, step: int) -> None:
        """Write the trace if `step` is the last of the window."""
        if self._is_tracing and step + 1 not in self._window:
            self.close()

    def close(self) -> None:
        """Write the trace if one is running."""
        if self._is_tracing:
            import jax

            self._is_tracing = False
            with self._reported():
                jax.profiler.stop_trace()
                self._print_line(
                    f"profiler trace written; to look at it, `pip install tensorboard xprof`, then "
                    f"`tensorboard --logdir {self._directory}` and its tab PROFILE"
                )

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Warn that a trace cannot be written, or raise `TelemetryError` if one is required."""
        try:
            yield
        # JAX raises errors of its own for files.
        except Exception as error:
            reason = f"profiler trace cannot be written to {self._directory}: {error}"
            if self._is_required:
                raise TelemetryError(f"{reason} ({REQUIRED})") from error
            self._window = range(0)
            self._print_line(f"warning: {reason}; training continues; {REQUIRED}=true would end it")
