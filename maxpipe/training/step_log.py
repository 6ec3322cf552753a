"""What came of each step, read one step late, so that the devices always have the next step to do."""

import time
from collections.abc import Callable
from typing import Any

import jax

from maxpipe.telemetry.recorder import Recorder


class StepLog:
    """Records steps, names those that were skipped, and counts those that were not finite.

    Args:
      recorder: where they go.
      max_consecutive_skips: `optimizer.max_consecutive_skips`.
      progress: called with each finished step in words.
    """

    def __init__(self, recorder: Recorder, max_consecutive_skips: int, progress: Callable[[str], None]):
        self._recorder = recorder
        self._limit = max_consecutive_skips
        self._progress = progress
        self._pending: tuple[int, Any] | None = None
        self._since = time.perf_counter()
        self._skips_in_row = 0
        self.last_is_finite = True

    @property
    def has_diverged(self) -> bool:
        """Whether as many recorded steps in a row as allowed were not finite."""
        return bool(self._limit) and self._skips_in_row >= self._limit

    def add(self, step: int, metrics: Any) -> None:
        """Takes a dispatched step's metrics and waits for the step before it."""
        self.finish()
        self._pending = (step, metrics)

    def finish(self) -> None:
        """Waits for the pending step and records it."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        values = {name: value.item() for name, value in jax.device_get(metrics).items()}
        seconds, self._since = time.perf_counter() - self._since, time.perf_counter()
        self._progress(f"step {step}")
        self.last_is_finite = values.pop("finite")
        self._skips_in_row = 0 if self.last_is_finite else self._skips_in_row + 1
        if values["skipped"]:
            why = "a spike" if self.last_is_finite else "not finite"
            what = f"loss {values['loss']:g}, gradient norm {values['grad_norm']:g}"
            self._recorder.say(f"step {step}: {why}, update skipped: {what}; batch {step - 1} counted from 0")
        self._recorder.step(step, step_seconds=seconds, **values)

    def resume(self) -> None:
        """Leaves what happened since the last step out of the next step's time."""
        if self._pending is None:
            self._since = time.perf_counter()
