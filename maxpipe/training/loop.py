"""The training loop: batch, step, log, evaluate, save, next."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.config.sections import Config
from maxpipe.data.loader import Loader, make_loader
from maxpipe.telemetry.profiler import Profiler
from maxpipe.telemetry.recorder import Recorder
from maxpipe.training.batches import BatchPlacer, all_rows
from maxpipe.training.engine import Engine

DONE, DIVERGED = 0, 42


@dataclass
class Run:
    """What the loop works with; built by `maxpipe.train`.

    Attributes:
      config: resolved.
      engine: owner of the live state.
      state: the engine's state after `step` finished steps.
      step: finished steps.
      loader: standing at batch `step`, counted from 0.
      place, place_eval: put batches on the devices.
      checkpointer, recorder, profiler: where results go.
      meta: what a checkpoint says about its run.
    """

    config: Config
    engine: Engine
    state: Any
    step: int
    loader: Loader
    place: BatchPlacer
    place_eval: BatchPlacer
    checkpointer: Checkpointer
    recorder: Recorder
    profiler: Profiler
    meta: dict[str, Any]


def train(run: Run) -> int:
    """Trains to the last step.

    Returns:
      The exit code: 0, or 42 if too many steps in a row were not finite.
    """
    config = run.config
    last = min(config.steps, config.stop_after or config.steps)
    log = _StepLog(run)
    # A transfer that nobody asked for would stall the device queue in every step.
    with jax.transfer_guard("disallow"):
        # The order is a contract: a checkpoint of step N holds the state after step N and the data position after batch
        # N, and the loader is touched nowhere else.
        while run.step < last:
            run.profiler.before(run.step + 1)
            batch = next(run.loader)
            run.state, metrics = run.engine.step(run.state, run.place(batch))
            run.step += 1
            log.add(run.step, metrics)
            due = _due(run, last)
            if due.any:
                log.finish()
            run.profiler.after(run.step)
            if log.has_diverged():
                return _diverged(run)
            if due.evaluate:
                evaluate(run)
            if due.save and log.last_is_finite:
                save(run)
            log.resume()
    return DONE


@dataclass(frozen=True)
class _Due:
    evaluate: bool
    save: bool
    end: bool
    trace: bool

    @property
    def any(self) -> bool:
        return self.evaluate or self.save or self.end or self.trace


def _due(run: Run, last: int) -> _Due:
    """What has to happen after the step just dispatched."""
    every, step = run.config.eval.every, run.step
    return _Due(
        evaluate=bool(every) and (step % every == 0 or step == run.config.steps),
        save=bool(run.config.checkpoint.every) and (run.checkpointer.due(step) or step == last),
        end=step == last,
        trace=step in run.config.telemetry.profile_steps,
    )


class _StepLog:
    """Reads each step's metrics one step late, so that the devices always have the next step to do."""

    def __init__(self, run: Run):
        self._run = run
        self._pending: tuple[int, Any] | None = None
        self._since = time.perf_counter()
        self._skips_in_row = 0
        self.last_is_finite = True

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
        self.last_is_finite = values.pop("finite")
        self._skips_in_row = 0 if self.last_is_finite else self._skips_in_row + 1
        if not self.last_is_finite:
            self._run.recorder.say(f"step {step}: loss or gradient is not finite; the update was skipped")
        self._run.recorder.step(step, step_seconds=seconds, **values)

    def has_diverged(self) -> bool:
        limit = self._run.config.optimizer.max_consecutive_skips
        return bool(limit) and self._skips_in_row >= limit

    def resume(self) -> None:
        """Leaves what happened since the last step out of the next step's time."""
        if self._pending is None:
            self._since = time.perf_counter()


def _diverged(run: Run) -> int:
    run.recorder.say(
        f"{run.config.optimizer.max_consecutive_skips} steps in a row were not finite "
        f"(optimizer.max_consecutive_skips); stopped without saving. Lower optimizer.learning_rate and start again: "
        f"the run continues from its last checkpoint"
    )
    return DIVERGED


def save(run: Run) -> None:
    """Starts an asynchronous checkpoint of the state after `run.step` and the data position after its batch."""
    rows = all_rows(run.loader.state, run.place.rows, run.config.data.global_batch_size)
    with jax.transfer_guard("allow"):
        run.checkpointer.save(run.step, run.engine.to_canonical(run.state), rows, run.meta, force=True)


def evaluate(run: Run) -> None:
    """Mean cross-entropy over the first `eval.batches` batches of the evaluation split, in nats per token."""
    loader = make_loader(run.config, "eval", run.place_eval.rows)
    try:
        sums = [run.engine.forward(run.state, run.place_eval(next(loader))) for _ in range(run.config.eval.batches)]
    finally:
        loader.close()
    sums = jax.device_get(sums)
    loss = sum(s["cross_entropy"] for s in sums) / max(sum(s["weight"] for s in sums), 1e-6)
    run.recorder.evaluation(run.step, float(loss))


def closing(run: Run, finish: Callable[[], int]) -> int:
    """Runs `finish` and closes everything, however it ends; an error of the last save comes up here."""
    try:
        return finish()
    finally:
        run.loader.close()
        run.profiler.close()
        try:
            run.checkpointer.close()
        finally:
            run.recorder.close()
