"""Account for the time of a run by phases, with goodput; name slow processes; trace a few steps."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Self

from maxpipe.telemetry.console import format_seconds
from maxpipe.telemetry.writers import not_written

PHASES = ("init", "restore", "compile", "data", "step", "checkpoint", "evaluation")
DOWNTIME = ("detection", "restart")  # what a process knows that a supervisor has started again
SHORT_SECONDS = 600.0  # the share of steps of a shorter process says nothing yet
COMPILE_EVENTS = "/jax/core/compile/"  # tracing, lowering, and XLA or the compilation cache

FACTOR = 2.0  # a slow process takes this many times as long as the others
LEAST_SECONDS = 0.02  # and this much longer: a host's time for logging does not matter
STEPS = 5  # steps in a row before a process is called slow, and before it no longer is


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

    `goodput` is the share of steps in the sum of all seconds: of phases, `lost` by an earlier
    process on steps after its last checkpoint, and `down`, in which no process of the run worked
    before this one began, by cause.
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
    covered = {"compile": " (initialisation, steps, evaluation)"}
    parts = [f"{p} {_duration(row[f'seconds_in_{p}'])}{covered.get(p, '')}" for p in shown]
    if row["seconds_lost"]:
        parts.append(f"steps repeated {_duration(row['seconds_lost'])}")
    if sum(row[f"seconds_in_{phase}"] for phase in PHASES) < SHORT_SECONDS:
        return f"time spent: {', '.join(parts)}"
    return f"goodput {100 * row['goodput']:.1f} %: {', '.join(parts)}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else format_seconds(seconds)


class SlowProcess:
    """Watches the stages of a run, and reports when their processes begin to be slow.

    All processes of a pipeline take equally long for a step; the seconds of each stage without its
    waiting show which of them the others wait for. A stage with more layers may be what is slow.
    """

    def __init__(self, processes: Sequence[frozenset[int]]):
        self._processes = processes
        self._named: frozenset[int] | None = None
        self._suspect: frozenset[int] | None = None
        self._steps = 0  # in a row with this suspect

    def after_step(self, step: int, seconds: Sequence[float]) -> str | None:
        """Return a line to print after a step, given the seconds of each stage."""
        times: dict[frozenset[int], float] = {}
        for holders, of_stage in zip(self._processes, seconds, strict=True):
            times[holders] = max(times.get(holders, 0.0), of_stage)
        slow = max(times, key=lambda holders: times[holders])
        own, others = times[slow], median(t for holders, t in times.items() if holders != slow)
        suspect = slow if own > max(FACTOR * others, others + LEAST_SECONDS) else None
        self._steps = self._steps + 1 if suspect == self._suspect else 1
        self._suspect = suspect
        if self._steps < STEPS or suspect == self._named:
            return None
        self._named = suspect
        if suspect is None:
            return None
        numbers = ", ".join(map(str, sorted(suspect)))
        name = f"process {numbers} is" if len(suspect) == 1 else f"processes {numbers} are"
        return (
            f"warning: {name} slow: without waiting for others, step {step} took {own:.3g} s there "
            f"and {others:.3g} s elsewhere; if the hosts are equally fast, "
            "pipeline.layers_per_stage=auto evens the stages out; otherwise look at that host. "
            "stage_seconds in metrics.jsonl has all stages"
        )


class Profiler:
    """Traces the steps from first to last, both included, for TensorBoard's or Perfetto's viewer.

    The loop calls `before` and `after` around every step, `after` once the results of a step that
    `ends_with` a trace are available, and `close` however it ends. A run that resumes or ends
    inside the window traces only the steps of the window that it makes. Every process writes its
    own files.

    Args:
      take_request: returns whether a trace was asked for since the last call; it begins with the
        next step and has `steps_on_request` steps. A request during a trace is answered by it.
    """

    def __init__(
        self,
        profile_steps: Sequence[int],
        directory: Path,
        *,
        steps_on_request: int = 1,
        take_request: Callable[[], bool] = lambda: False,
        is_required: bool = False,
        print_line: Callable[[str], None] = print,
    ):
        self._window = range(profile_steps[0], profile_steps[1] + 1) if profile_steps else range(0)
        self._directory = directory
        self._steps_on_request, self._take_request = steps_on_request, take_request
        self._is_required = is_required
        self._print_line = print_line
        self._last = 0  # step of the trace that is being made; 0 = none

    def before(self, step: int) -> None:
        is_asked = self._take_request()
        if self._last or not (is_asked or step in self._window):
            return
        import jax

        with self._reported():
            jax.profiler.start_trace(str(self._directory))
            self._last = step + self._steps_on_request - 1 if is_asked else self._window[-1]

    def ends_with(self, step: int) -> bool:
        return 0 < self._last <= step

    def after(self, step: int) -> None:
        if self.ends_with(step):
            self.close()

    def close(self) -> None:
        if self._last:
            import jax

            self._last = 0
            with self._reported():
                jax.profiler.stop_trace()
                self._print_line(
                    f"profiler trace written; to look at it, `pip install tensorboard xprof`, then "
                    f"`tensorboard --logdir {self._directory}` and its tab PROFILE"
                )

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # JAX raises errors of its own for files
            self._window = range(0)
            what = f"profiler trace in {self._directory}"
            not_written(what, error, self._is_required, self._print_line)
