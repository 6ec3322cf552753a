"""What came of each step, read one step late, so that the devices always have the next step to do.

The training loop: batch, step, log, evaluate, save, next."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.policies import EVAL_LOSS
from maxpipe.config.sections import Config
from maxpipe.data.loader import Loader
from maxpipe.supervision.supervise import Supervision
from maxpipe.telemetry.profiling import Profiler
from maxpipe.telemetry.recorder import Recorder
from maxpipe.training.batches import BatchPlacer, all_rows
from maxpipe.training.trainer import Trainer


class StepLog:
    """Records steps, names those that were skipped, and counts those that were not finite.

    Args:
      recorder: where they go.
      max_consecutive_skips: `optimizer.max_consecutive_skips`.
      progress: called with each finished step in words.
    """

    def __init__(
        self, recorder: Recorder, max_consecutive_skips: int, progress: Callable[[str], None]
    ):
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
            self._recorder.say(
                f"step {step}: {why}, update skipped: {what}; batch {step - 1} counted from 0"
            )
        self._recorder.step(step, step_seconds=seconds, **values)

    def resume(self) -> None:
        """Leaves what happened since the last step out of the next step's time."""
        if self._pending is None:
            self._since = time.perf_counter()


DONE, DIVERGED = 0, 42


@dataclass
class Run:
    """What the loop works with; built by `maxpipe.builder`.

    Attributes:
      config: resolved.
      engine: owner of the live state.
      state: the engine's state after `step` finished steps.
      step: finished steps.
      loader: standing at batch `step`, counted from 0.
      place, place_eval: put batches on the devices.
      checkpointer, recorder, profiler: where results go.
      meta: what a checkpoint says about its run.
      supervision: signals, deadlines and time accounting.
      eval_loader: of the evaluation split, if there are evaluations.
      eval_losses: step -> loss of the latest evaluation, if it is finite.
    """

    config: Config
    engine: Trainer
    state: Any
    step: int
    loader: Loader
    place: BatchPlacer
    place_eval: BatchPlacer
    checkpointer: Checkpointer
    recorder: Recorder
    profiler: Profiler
    meta: dict[str, Any]
    supervision: Supervision = field(default_factory=Supervision)
    eval_loader: Loader | None = None
    eval_losses: dict[int, float] = field(default_factory=dict)


def train(run: Run) -> int:
    """Trains to the last step, or until somebody asks to stop.

    Returns:
      The exit code: 0, 75 or 130 after a signal, or 42 if too many steps in a row were not finite.
    """
    config, time, stop = run.config, run.supervision.time, run.supervision.interruption
    last = min(config.steps, config.stop_after or config.steps)
    log = StepLog(
        run.recorder, config.optimizer.max_consecutive_skips, run.supervision.watchdog.progress
    )
    saved = run.step
    stop.begin()
    time.enter("step")
    # A transfer that nobody asked for would stall the device queue in every step.
    with jax.transfer_guard("disallow"):
        # The order is a contract: a checkpoint of step N holds the state after step N and the data
        # position after batch N, and the loader is touched nowhere else.
        while run.step < last and not (is_interrupted := stop.after(run.step)):
            run.profiler.before(run.step + 1)
            with time.phase("data"):
                batch = next(run.loader)
            run.state, metrics = run.engine.step(run.state, run.place(batch))
            run.step += 1
            log.add(run.step, metrics)
            due = _due(run)
            if due.any:
                log.finish()
            run.profiler.after(run.step)
            if log.has_diverged:
                return _diverged(run)
            if due.evaluate:
                evaluate(run)
            if due.save and log.last_is_finite:
                save(run)
                saved = run.step
            log.resume()
        log.finish()
        if log.has_diverged:
            return _diverged(run)
        is_saved_at_all = config.checkpoint.every or config.checkpoint.every_minutes
        if is_saved_at_all and run.step > saved and log.last_is_finite:
            save(run)
    return stop.exit_code if run.step < last and is_interrupted else DONE


@dataclass(frozen=True)
class _Due:
    evaluate: bool
    save: bool
    trace: bool

    @property
    def any(self) -> bool:
        return self.evaluate or self.save or self.trace


def _due(run: Run) -> _Due:
    """What has to happen after the step just dispatched."""
    every, step = run.config.eval.every, run.step
    return _Due(
        evaluate=bool(every) and (step % every == 0 or step == run.config.steps),
        save=run.checkpointer.due(step),
        trace=step in run.config.telemetry.profile_steps,
    )


def _diverged(run: Run) -> int:
    run.recorder.say(
        f"{run.config.optimizer.max_consecutive_skips} steps in a row were not finite "
        f"(optimizer.max_consecutive_skips); stopped without saving. Lower optimizer.learning_rate and start "
        f"again: the run continues from its last checkpoint"
    )
    return DIVERGED


def save(run: Run) -> None:
    """Starts an asynchronous checkpoint: the state after `run.step`, the data position after its batch."""
    with run.supervision.time.phase("checkpoint"), jax.transfer_guard("allow"):
        rows = all_rows(run.loader.state, run.place.rows, run.config.data.global_batch_size)
        meta = run.meta | {EVAL_LOSS: run.eval_losses.get(run.step)}
        run.checkpointer.save(run.step, run.engine.to_canonical(run.state), rows, meta)
    run.supervision.watchdog.progress(f"the start of saving step {run.step}")


def evaluate(run: Run) -> None:
    """Mean cross-entropy over the first `eval.batches` batches of the evaluation split, in nats per token."""
    loader = run.eval_loader
    assert loader is not None
    with run.supervision.time.phase("evaluation"):
        loader.restart()
        batches = (run.place_eval(next(loader)) for _ in range(run.config.eval.batches))
        sums = jax.device_get([run.engine.forward(run.state, batch) for batch in batches])
        loss = float(
            sum(s["cross_entropy"] for s in sums) / max(sum(s["weight"] for s in sums), 1e-6)
        )
        run.eval_losses = {run.step: loss} if math.isfinite(loss) else {}
        run.recorder.evaluation(run.step, loss)
    run.supervision.watchdog.progress(f"the evaluation after step {run.step}")


def closing(run: Run, finish: Callable[[], int]) -> int:
    """Runs `finish` and closes everything, however it ends; an error of the last save comes up here."""
    try:
        return finish()
    finally:
        for loader in (run.loader, run.eval_loader):
            if loader is not None:
                loader.close()
        run.profiler.close()
        try:
            with run.supervision.time.phase("checkpoint"):
                run.checkpointer.close()
        finally:
            run.recorder.time_account(run.step, run.supervision.time.seconds())
            run.recorder.close()
