"""`Recorder`: the one object through which the training loop reports."""

from collections.abc import Mapping
from pathlib import Path

from maxpipe.config.sections import Config
from maxpipe.telemetry.console import Console, Progress
from maxpipe.telemetry.profiling import goodput_line, goodput_row
from maxpipe.telemetry.writers import MetricsFile, TensorBoard


class Recorder:
    """Writes each finished step to `metrics.jsonl`, each `log_every`-th to console and TensorBoard.

    Files in `run_dir`:
      metrics.jsonl: one row for every finished step with `step, loss, grad_norm, learning_rate,
        step_seconds, tokens_per_second, mfu` and the extra values of the step; rows `step,
        eval_loss` for evaluations; at the end of each process `step, goodput` and its parts
        (`maxpipe.telemetry.profiling`). Numbers that are not finite, and `mfu` if the peak is
        unknown, are null.
      tensorboard/: the same values as scalars.

    Args:
      config: the run's resolved configuration.
      run_dir: the run's directory, created if missing.
      start_step: steps finished before this process: the restored checkpoint's step, or 0. Rows
        after it, written by a process that died later than its last checkpoint, are dropped.
      tokens_per_step: tokens in a global batch.
      flops_per_step: model FLOPs of a step on a global batch.
      peak_flops: peak FLOP/s of all devices together, or None if unknown.
      is_main: false in all processes but one; there the recorder does nothing.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        start_step: int,
        tokens_per_step: int,
        flops_per_step: float,
        peak_flops: float | None,
        is_main: bool = True,
    ):
        self._is_main = is_main
        self._tokens = tokens_per_step
        self._flops = flops_per_step
        self._peak = peak_flops
        self._log_every = config.telemetry.log_every
        self._first_step = start_step + 1
        self._last_step = config.steps
        if not is_main:
            return
        self._metrics = MetricsFile(run_dir / "metrics.jsonl", start_step)
        self._tensorboard = (
            TensorBoard(run_dir / "tensorboard", start_step) if self._log_every else None
        )
        self._console = Console(
            total_steps=config.steps,
            start_step=start_step,
            log_every=self._log_every,
            tokens_per_step=tokens_per_step,
            flops_per_step=flops_per_step,
            peak_flops=peak_flops,
        )

    def step(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        step_seconds: float,
        **extra: float,
    ) -> None:
        """Record a finished step.

        Args:
          step: number of the step, counted from 1.
          loss, grad_norm, learning_rate: Python floats, to which a float32 converts exactly.
          step_seconds: wall-clock seconds of this step.
          **extra: more values of the step, written under their own names.
        """
        if not self._is_main:
            return
        row: dict[str, float | int | None] = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "step_seconds": step_seconds,
            "tokens_per_second": self._tokens / step_seconds,
            "mfu": None if self._peak is None else self._flops / (step_seconds * self._peak),
        }
        assert not row.keys() & extra.keys(), (
            f"{row.keys() & extra.keys()} would hide values of the step"
        )
        row.update(extra)
        self._metrics.write(row)
        self._console.step(Progress(step, loss, learning_rate, step_seconds))
        if self._tensorboard is not None and self._is_logged(step):
            # A card of zeros for the skipped steps that most runs do not have would only distract.
            shown = {
                key: row[key] for key in row if key != "step" and (key != "skipped" or row[key])
            }
            self._tensorboard.write(step, {f"train/{key}": shown[key] for key in shown})

    def evaluation(self, step: int, eval_loss: float) -> None:
        """Record the loss on held-out data after `step`, nats per token."""
        if not self._is_main:
            return
        self._metrics.write({"step": step, "eval_loss": eval_loss})
        self._console.say(f"step {step}/{self._last_step}  eval loss {eval_loss:.4f}")
        if self._tensorboard is not None:
            self._tensorboard.write(step, {"eval/loss": eval_loss})
            self._tensorboard.flush()

    def time_account(self, step: int, seconds: Mapping[str, float]) -> None:
        """Record where the time of this process went; called after everything else.

        Args:
          step: finished steps.
          seconds: from `TimeAccount.seconds`.
        """
        if not self._is_main:
            return
        row = goodput_row(seconds, self._metrics.lost_seconds)
        self._metrics.write({"step": step, **row})
        self._console.close()  # prints the last step before the account
        self._console.say(goodput_line(row))

    def say(self, text: str) -> None:
        """Print `text` on lines of its own without breaking the progress bar."""
        if self._is_main:
            self._console.say(text)

    def close(self) -> None:
        """Show the last step and close the files; call it however the run ends."""
        if not self._is_main:
            return
        self._console.close()
        self._metrics.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _is_logged(self, step: int) -> bool:
        return step % self._log_every == 0 or step in (self._first_step, self._last_step)
