"""Run the training loop: batch, step, log, evaluate, save, next."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from maxpipe.checkpoint.errors import StateNotFinite
from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.policies import EVAL_LOSS
from maxpipe.config.sections import Config
from maxpipe.data.held_out import HeldOut
from maxpipe.data.loader import Loader
from maxpipe.pipeline.engines.base import Metrics
from maxpipe.supervise.failure import ending_with_lost_process
from maxpipe.supervise.process import Supervision
from maxpipe.telemetry.profiling import Profiler
from maxpipe.telemetry.recorder import Recorder
from maxpipe.telemetry.writers import Row
from maxpipe.training.batches import BatchPlacer, all_rows
from maxpipe.training.trainer import Trainer

DONE, DIVERGED = 0, 42  # exit codes

OnStep = Callable[[int, Row], None]


@dataclass(kw_only=True)
class Session:
    """What the loop works with; built by `maxpipe.training.start.start_session`.

    Attributes:
      state: the trainer's state after `step` finished steps.
      skips: number of non-finite steps in a row, up to now.
      loader: training data; its next batch is batch `step`, counted from 0.
      meta: what a checkpoint records about its run.
      held_out: batches of an evaluation; None without evaluations.
      begin_phase: changes the batch size and the weights of the mixture to those due after `step`.
      token_bytes: bytes of text of each token id, int32 [model.vocab_size]; None if unknown.
      eval_losses: {step: loss} of the latest evaluation, empty if it was not finite.
      on_step: called with each finished step and its row of `metrics.jsonl`, while `state` is the
        state after that step; the loop then waits for every step.
    """

    config: Config
    trainer: Trainer
    state: Any
    step: int
    loader: Loader
    place: BatchPlacer
    place_eval: BatchPlacer
    checkpointer: Checkpointer
    recorder: Recorder
    profiler: Profiler
    meta: dict[str, Any]
    begin_phase: Callable[["Session"], None] = lambda run: None
    skips: int = 0
    supervision: Supervision = field(default_factory=Supervision)
    held_out: HeldOut | None = None
    held_out_by_source: Mapping[str, HeldOut] = field(default_factory=dict)
    token_bytes: np.ndarray | None = None
    eval_losses: dict[int, float] = field(default_factory=dict)
    on_step: OnStep | None = None


def train(run: Session) -> int:
    """Train to the last step, or until a signal asks to stop; return the exit code.

    It is 0, 75 or 130 after a signal, or 42 if too many steps in a row, or the state to save, were
    not finite.
    """
    try:
        return _train(run)
    except StateNotFinite as error:
        return _diverged(run, f"{error}: the learning rate is too high for the update")


def _train(run: Session) -> int:
    config, clock, signals = run.config, run.supervision.time, run.supervision.interruption
    # `stop_after` ends this start early; schedules still end at `steps`.
    last_step = min(config.steps, config.stop_after or config.steps)
    step_log = StepLog(run)
    phases = {change[0] for change in config.data.batch_ramp + config.data.mixture_changes}
    saved_step = run.checkpointer.saved_step  # below `run.step` if that step is only in memory
    is_overdue = False  # a step due for saving was not finite
    is_interrupted = False
    clock.enter("step")
    # An implicit transfer would stall the device queue in every step.
    with jax.transfer_guard("disallow"):
        # The order is a contract: a checkpoint of step N holds the state after step N and the data
        # position after batch N, and the loader is advanced only here.
        while run.step < last_step:
            is_interrupted = signals.after(run.step)
            if is_interrupted:
                break
            run.supervision.lease.check()
            # 1. Batch and step; the step is only dispatched, not waited for.
            run.profiler.before(run.step + 1)
            with clock.phase("data"):
                batch = next(run.loader)
            step_log.begin()
            with jax.profiler.StepTraceAnnotation("train", step_num=run.step + 1):
                run.state, metrics = run.trainer.step(run.state, run.place(batch))
            run.step += 1
            # 2. Log the step before this one, and this one too if it must be finished now.
            step_log.add(run.step, metrics)
            is_due = run.checkpointer.due(run.step) or is_overdue  # `due` is called every step
            is_replica_due = run.checkpointer.replica_due(run.step)
            every = config.eval.every
            evaluates = bool(every) and (run.step % every == 0 or run.step == config.steps)
            # A trace is complete only when the step is, and the callback must see the state after
            # its step, not one that is a step ahead.
            is_watched = run.profiler.ends_with(run.step) or run.on_step is not None
            if is_due or is_replica_due or evaluates or is_watched:
                step_log.finish()
            run.profiler.after(run.step)
            if step_log.has_diverged:
                return _too_many_skips(run, step_log, saved_step)
            # 3. Evaluate and save.
            if evaluates:
                evaluate(run)
            is_overdue = is_due and not step_log.last_is_finite
            if is_due and not is_overdue:
                save(run)
                saved_step = run.step
            elif is_replica_due and step_log.last_is_finite:
                _checkpoint(run, run.checkpointer.replicate)
            if run.step in phases and run.step < last_step:
                step_log.finish()
                _begin_phase(run)
            step_log.resume()
        # 4. The last step is still pending: finish it, and save what is not saved yet. A step that
        # was not finite has left the parameters as they were, and is counted in the state.
        step_log.finish()
        if step_log.has_diverged:
            return _too_many_skips(run, step_log, saved_step)
        if run.step > saved_step:
            if config.checkpoint.every or config.checkpoint.every_minutes:
                save(run)
            else:
                # Without checkpoints, too, a state that is not finite must not pass for success.
                with jax.transfer_guard("allow"):
                    run.checkpointer.check(run.step, run.state)
    return signals.exit_code if is_interrupted else DONE


def _begin_phase(run: Session) -> None:
    with run.supervision.time.phase("init"), jax.transfer_guard("allow"):
        run.begin_phase(run)
    # The next step may be compiled: who asks to stop waits for it.
    what = f"the change after step {run.step}"
    run.supervision.watchdog.progress(what, before_step=False)


def _too_many_skips(run: Session, step_log: "StepLog", saved_step: int) -> int:
    run.step = step_log.last_step
    count = step_log.skips
    remedy = ""
    # No step since the save was finite: the saved state itself may be the cause.
    if saved_step and saved_step >= run.step - count:
        remedy = (
            f". They began with what is saved as step {saved_step}; if the next start ends like "
            f"this, go back to an earlier step with checkpoint.resume, or choose another run_name"
        )
    reason = f"{count} steps in a row were not finite (optimizer.max_consecutive_skips)"
    return _diverged(run, reason, remedy)


def _diverged(run: Session, reason: str, remedy: str = "") -> int:
    lower = "Lower optimizer.learning_rate and start again"
    run.recorder.print_line(f"{reason}; stopped without saving. {lower}{remedy}")
    return DIVERGED


def save(run: Session) -> None:
    """Start an asynchronous checkpoint of the state and the data position after `run.step`."""
    # Check again, not only at the last renewal: a new owner's steps must not be overwritten.
    run.supervision.lease.verify()
    # A crash on either side of this leaves rows that fit the newest checkpoint.
    on_set_aside = run.recorder.give_up_later
    _checkpoint(run, partial(run.checkpointer.save, on_set_aside=on_set_aside))
    run.recorder.checkpoint(run.step)


def _checkpoint(
    run: Session, start: Callable[[int, object, np.ndarray, dict[str, Any]], object]
) -> None:
    run.supervision.watchdog.progress(f"step {run.step}", before_step=False)
    with run.supervision.time.phase("checkpoint"), jax.transfer_guard("allow"):
        rows = data_position(run)
        # `checkpoint.keep_best` compares steps by this loss.
        meta = run.meta | {EVAL_LOSS: run.eval_losses.get(run.step)}
        start(run.step, run.trainer.to_canonical(run.state), rows, meta)
    run.supervision.watchdog.progress(f"the start of saving step {run.step}")


def data_position(run: Session) -> np.ndarray:
    """Return the data position after the last batch, int64 [B, 3], in every process."""
    return all_rows(run.loader.state, run.place.rows, run.place.num_rows)


def evaluate(run: Session) -> None:
    """Record the mean cross-entropy of all held-out data and of each source of a mixture, and how
    `eval.prompts` continue.
    """
    assert run.held_out is not None
    run.supervision.watchdog.progress(f"step {run.step}", before_step=False)
    with run.supervision.time.phase("evaluation"):
        sums = {"the evaluation": _evaluate(run, run.held_out)}
        sums |= {name: _evaluate(run, source) for name, source in run.held_out_by_source.items()}
        losses = {
            name: total["cross_entropy"] / total["weight"] if total["weight"] else math.nan
            for name, total in sums.items()
        }
        whole, loss = sums["the evaluation"], losses.pop("the evaluation")
        run.eval_losses = {run.step: loss} if math.isfinite(loss) else {}
        nats, all_bytes = whole["cross_entropy"], whole["bytes"]
        bits_per_byte = nats / math.log(2) / all_bytes if all_bytes else None
        run.recorder.evaluation(run.step, loss, bits_per_byte, losses)
        for name, total in sums.items():
            if not total["weight"]:
                run.recorder.print_line(
                    f"step {run.step}: no loss of {name}: its batches have no token to predict; "
                    "are prompts longer than data.sequence_length?"
                )
        if run.config.eval.prompts:
            with jax.transfer_guard("allow"):
                params = run.trainer.canonical_params(run.state)
            from maxpipe.training.samples import samples

            progress = partial(run.supervision.watchdog.progress, before_step=False)
            run.recorder.samples(run.step, samples(run.config, params, progress))
    run.supervision.watchdog.progress(f"the evaluation after step {run.step}")


def _evaluate(run: Session, held_out: HeldOut) -> Counter[str]:
    """Return sums over all batches: "cross_entropy", "weight", and "bytes" if they are known."""
    total, pending = Counter[str](), Metrics()
    for batch in held_out:
        sums = dict(run.trainer.forward(run.state, run.place_eval(batch)))
        if run.token_bytes is not None:
            of_targets = run.token_bytes[batch["targets"]] * batch["weights"]
            sums["bytes"] = _sum(run.place_eval({"bytes": of_targets})["bytes"])
        # One batch late, so that the devices have work but few batches are in memory.
        total.update(_floats(pending))
        pending = sums
        run.supervision.watchdog.progress(f"evaluating after step {run.step}", before_step=False)
    total.update(_floats(pending))
    return total


def _floats(metrics: Metrics) -> dict[str, float]:
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


@jax.jit
def _sum(x: jax.Array) -> jax.Array:
    return x.sum()


def run_and_close(run: Session, train: Callable[[], int]) -> int:
    """Call `train`, close everything however it ended; raise the error of a failed last save."""
    supervision = run.supervision

    def announce_end() -> None:
        what = f"the end of training after step {run.step}"
        supervision.watchdog.progress(what, before_step=False)

    def end_saves() -> None:
        with supervision.time.phase("checkpoint"):
            # A directory that has another owner is left alone.
            if not supervision.lease.lost:
                run.checkpointer.close()

    def account_for_time() -> None:
        seconds, down = supervision.time.seconds(), supervision.downtime
        run.recorder.time_account(run.step, seconds, down)

    with ExitStack() as ending:  # the last one added is closed first, and all are
        ending.callback(run.recorder.close)
        ending.callback(account_for_time)
        ending.callback(end_saves)
        ending.callback(run.profiler.close)
        ending.callback(run.loader.close)
        ending.callback(announce_end)
        with ending_with_lost_process():
            exit_code = train()
    supervision.lease.verify()
    return exit_code


class StepLog:
    """Records steps one step late, so that the devices always have the next step to do.

    Reports skipped steps, and counts steps in a row that were not finite.
    """

    def __init__(self, run: Session):
        self._run = run
        self._pending: tuple[int, Metrics] | None = None
        self._since = self._begun = time.perf_counter()
        self._seconds = 0.0  # of the last step
        self.skips = run.skips
        self.last_step = 0
        self.last_is_finite = True

    @property
    def has_diverged(self) -> bool:
        limit = self._run.config.optimizer.max_consecutive_skips
        # Without a recorded step the count is an earlier start's, perhaps with a higher limit.
        return bool(limit) and self.skips >= limit and not self.last_is_finite

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def add(self, step: int, metrics: Metrics) -> None:
        """Take a dispatched step's metrics, and wait for the step before it."""
        # A dispatch may take as long as the step: mpmd's does where stages wait for each other. The
        # step before, if it ended during the dispatch, is taken to have been as long as its own.
        arrays = [x for x in jax.tree.leaves(self._pending) if isinstance(x, jax.Array)]
        is_over = all(array.is_ready() for array in arrays)  # type: ignore[attr-defined]
        likely = min(max(self._since + self._seconds, self._begun), time.perf_counter())
        self.finish(likely if is_over else None)
        self._pending = (step, metrics)

    def finish(self, ended: float | None = None) -> None:
        """Wait for the pending step and record it.

        Args:
          ended: when it was over, as `time.perf_counter()` has it; by default when the wait is.
        """
        if self._pending is None:
            return
        # Cleared first: an error below must not make `finish` wait for this step again.
        (step, metrics), self._pending = self._pending, None
        # Scalars, and figures of each layer as lists.
        values = {name: value.tolist() for name, value in jax.device_get(metrics).items()}
        ended = time.perf_counter() if ended is None else ended
        self._seconds, self._since = ended - self._since, ended
        self._run.supervision.finished_step(step)
        self.last_step = step
        self.last_is_finite = values.pop("finite")
        self.skips = 0 if self.last_is_finite else self.skips + 1
        if values["skipped"]:
            # Only without a target is the loss exactly 0.
            of_finite = "a spike" if values["loss"] else "no token to learn"
            why = of_finite if self.last_is_finite else "not finite"
            what = f"loss {values['loss']:g}, gradient norm {values['grad_norm']:g}"
            self._run.recorder.print_line(
                f"step {step}: {why}, update skipped: {what}; batch {step - 1} counted from 0"
            )
        stages = self._run.trainer.stage_seconds()
        row = self._run.recorder.step(
            step, step_seconds=self._seconds, stage_seconds=stages, **values
        )
        if self._run.on_step is not None:
            with jax.transfer_guard("allow"):  # a caller may look at arrays
                self._run.on_step(step, row)

    def resume(self) -> None:
        """Exclude the time since the last step from the next step's."""
        if self._pending is None:
            self._since = time.perf_counter()
            self._run.trainer.resume_clocks()
