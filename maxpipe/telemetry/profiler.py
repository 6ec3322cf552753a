"""A profiler trace of a few steps, for TensorBoard's or Perfetto's trace viewer."""

from collections.abc import Sequence
from pathlib import Path


class Profiler:
    """Traces steps first to last, both included, into `directory`.

    The loop calls `before` and `after` around every step, `after` once the step's results are
    there, and `close` however it ends. A run that resumes inside the window traces what is left of
    it; one that ends inside it writes what it has.

    Args:
      profile_steps: `telemetry.profile_steps`: [first, last], counted from 1; empty = no trace.
      directory: where JAX writes `plugins/profile/...`; every process writes its own files.
    """

    def __init__(self, profile_steps: Sequence[int], directory: Path):
        self._window = range(profile_steps[0], profile_steps[1] + 1) if profile_steps else range(0)
        self._directory = directory
        self._is_tracing = False

    def before(self, step: int) -> None:
        if step in self._window and not self._is_tracing:
            import jax

            jax.profiler.start_trace(str(self._directory))
            self._is_tracing = True

    def after(self, step: int) -> None:
        if self._is_tracing and step + 1 not in self._window:
            self.close()

    def close(self) -> None:
        if self._is_tracing:
            import jax

            self._is_tracing = False
            jax.profiler.stop_trace()
