"""Record what the training loop reports, through the one object that it knows."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from operator import methodcaller
from pathlib import Path

from maxpipe.config.identity import Change
from maxpipe.config.sections import Config
from maxpipe.config.terminal import printable
from maxpipe.telemetry.console import Console
from maxpipe.telemetry.profiling import SlowProcess, goodput_line, goodput_row
from maxpipe.telemetry.prometheus import Prometheus
from maxpipe.telemetry.trackers import Trackers
from maxpipe.telemetry.writers import MetricsFile, Row, Sink, TensorBoard, Value

SOURCES_SHOWN = 4  # losses of sources on the console, the largest ones
_PROMPT_SHOWN = 40  # characters before a sample on the console
METRICS, TENSORBOARD = "metrics.jsonl", "tensorboard"  # in the run's directory


class Recorder:
    """Writes each finished step to `metrics.jsonl`, each `log_every`-th to console and TensorBoard.

    Trackers get the same values as TensorBoard, Prometheus all rows. A failed write is reported
    once, or raises `TelemetryError` with `telemetry.required`.

    Besides rows of steps, `metrics.jsonl` has rows of evaluations, with `eval_loss/SOURCE` for each
    source of a mixture; rows `step, changed, before, now` for keys that a resumed start has
    changed; and at the end of each process `step, goodput` and its parts. Numbers that are not
    finite, and `mfu` if the peak is unknown, are null. Figures of layers are lists in model order.

    Args:
      start_step: steps finished before this process: the restored checkpoint's step, or 0. Rows
        after it, written by a process that died later than its last checkpoint, are dropped.
      keeps_later: whether newer steps are saved; if so their rows stay until `give_up_later`.
      peak_seconds: seconds of the model FLOPs of a step at the peak of all devices together; None
        if the chip is unknown.
      is_main: false in all processes but one, in which the recorder does nothing.
      stage_processes: for each stage, the processes that hold it; empty unless stages have programs
        of their own, in different processes.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        start_step: int,
        keeps_later: bool = False,
        tokens_per_step: int,
        peak_seconds: float | None,
        is_main: bool = True,
        stage_processes: Sequence[frozenset[int]] = (),
        prometheus: Prometheus | None = None,
    ):
        self._is_main = is_main
        self._tokens = tokens_per_step
        self._peak_seconds = peak_seconds
        self._log_every = config.telemetry.log_every
        self._first_step = start_step + 1
        self._last_step = config.steps
        self._dense_layers = config.model.first_dense_layers
        self._slow_process = SlowProcess(stage_processes) if len({*stage_processes}) > 1 else None
        if not is_main:
            return
        self._console = Console(
            total_steps=config.steps,
            start_step=start_step,
            log_every=self._log_every,
            tokens_per_step=tokens_per_step,
            peak_seconds=peak_seconds,
        )
        is_required, print_line = config.telemetry.required, self._console.print_line
        self._metrics = Sink(
            str(run_dir / METRICS),
            lambda: MetricsFile(run_dir / METRICS, start_step, keeps_later=keeps_later),
            is_required=is_required,
            print_line=print_line,
            tries_again=True,
        )
        self._tensorboard = None
        if self._log_every:
            self._tensorboard = Sink(
                str(run_dir / TENSORBOARD),
                lambda: TensorBoard(run_dir / TENSORBOARD, start_step),
                is_required=is_required,
                print_line=print_line,
            )
        self._trackers = Trackers(config, run_dir, start_step > 0, print_line)
        self._prometheus = prometheus or Prometheus()
        self._prometheus.show({"step": start_step})
        self._step = start_step

    def new_batch(self, step: int, tokens_per_step: int, peak_seconds: float | None) -> None:
        """Go on after `step` with batches of another size; arguments as when it was made."""
        self._tokens, self._peak_seconds = tokens_per_step, peak_seconds
        if self._is_main:
            self._console.new_batch(step, tokens_per_step, peak_seconds)

    def step(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        step_seconds: float,
        stage_seconds: Sequence[float] = (),
        **extra: float | list[float],
    ) -> Row:
        """Record a finished step, and return its row, in which numbers may be not finite.

        Args:
          step: number of the step, counted from 1.
          stage_seconds: seconds of each stage without its waiting for others, if known.
          **extra: more values of the step, written under their own names; a list has a number for
            each layer after the first dense ones.
        """
        row: dict[str, Value] = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "step_seconds": step_seconds,
            "tokens_per_second": self._tokens / step_seconds,
            "mfu": None if self._peak_seconds is None else self._peak_seconds / step_seconds,
        }
        assert not row.keys() & extra.keys()
        scalars = {name: value for name, value in extra.items() if not isinstance(value, list)}
        dense = [math.nan] * self._dense_layers
        layers = {name: dense + value for name, value in extra.items() if isinstance(value, list)}
        row.update({**scalars, **layers})
        if stage_seconds:
            row["stage_seconds"] = list(stage_seconds)
        if not self._is_main:
            return row
        self._metrics.use(lambda file: file.write(row))
        skipped = bool(row.get("skipped"))
        self._prometheus.show(row, tokens=self._tokens, skipped_steps=skipped)
        self._console.step(row)
        if self._slow_process and (line := self._slow_process.after_step(step, stage_seconds)):
            self._console.print_line(line)
        self._step = step
        is_end = step in (self._first_step, self._last_step)
        if self._tensorboard is not None and (is_end or step % self._log_every == 0):
            # A card of zeros for the skipped steps that most runs do not have would only distract.
            hidden = {"step"} if row.get("skipped") else {"step", "skipped"}
            hidden |= {*layers, "stage_seconds"}
            points = {f"train/{key}": row[key] for key in row if key not in hidden}
            for name, values in layers.items():
                points |= _numbered(f"{name}/layer", values)
            points |= _numbered("stage_seconds/stage", stage_seconds)
            self._tensorboard.use(lambda events: events.write(step, points))
            self._trackers.log(step, points)
        return row

    def changes(self, step: int, changes: Iterable[Change]) -> None:
        """Record what this start has changed since `step`, from which it resumes."""
        if self._is_main:
            for change in changes:
                fields = step, change.key, change.before, change.now
                self._metrics.use(methodcaller("write_change", *fields))

    def give_up_later(self) -> None:
        """Drop the rows of newer steps if they were kept: the steps are set aside now."""
        if self._is_main:
            self._metrics.use(MetricsFile.give_up_later)

    def evaluation(
        self,
        step: int,
        eval_loss: float,
        bits_per_byte: float | None = None,
        by_source: Mapping[str, float] | None = None,
    ) -> None:
        """Record an evaluation on held-out data after `step`: losses are in nats per token."""
        if not self._is_main:
            return
        losses = by_source or {}
        perplexity = math.inf if eval_loss > 700 else math.exp(eval_loss)
        values = {"loss": eval_loss, "perplexity": perplexity}
        parts = [f"eval loss {eval_loss:.4f}", f"perplexity {perplexity:.4g}"]
        if bits_per_byte is not None:
            values["bits_per_byte"] = bits_per_byte
            parts.append(f"{bits_per_byte:.4f} bits/byte")
        values |= {f"loss/{name}": loss for name, loss in losses.items()}
        # NaN, which has no order, comes first.
        ranked = sorted(losses, key=lambda name: (losses[name] < math.inf, -losses[name]))
        worst = ranked[:SOURCES_SHOWN]
        parts += [f"{name} {loss:.4f}" for name, loss in losses.items() if name in worst]
        if len(losses) > len(worst):
            parts.append(f"and {len(losses) - len(worst)} lower")
        row = {f"eval_{name}": value for name, value in values.items()}
        self._metrics.use(lambda file: file.write({"step": step, **row}))
        self._prometheus.show(row)
        self._console.print_line("  ".join([f"step {step}/{self._last_step}", *parts]))
        if self._tensorboard is not None:
            scalars = {f"eval/{name}": value for name, value in values.items()}
            self._tensorboard.use(lambda events: events.write(step, scalars))
            self._tensorboard.use(TensorBoard.flush)
            self._trackers.log(step, scalars)

    def samples(self, step: int, pairs: Iterable[tuple[str, str]]) -> None:
        """Show texts and how the model continues them after `step`, on console and TensorBoard."""
        if not self._is_main:
            return
        for number, (prompt, text) in enumerate(pairs, 1):
            line = f'step {step}/{self._last_step}  "{prompt[-_PROMPT_SHOWN:]}" -> "{text}"'
            self._console.print_line(printable(line))
            if self._tensorboard is not None:
                named = step, f"eval/sample_{number}", prompt + text
                self._tensorboard.use(methodcaller("write_text", *named))

    def checkpoint(self, step: int) -> None:
        """Record that the state after `step` is being saved."""
        if self._is_main:
            self._prometheus.show({"checkpoint_step": step}, checkpoints=1)

    def time_account(
        self, step: int, seconds: Mapping[str, float], down: Mapping[str, float] | None = None
    ) -> None:
        """Record where the time of this process went, see `goodput_row`; called at the end."""
        if not self._is_main:
            return
        metrics = self._metrics.writer
        row = goodput_row(seconds, metrics.lost_seconds if metrics else 0.0, down)
        self._metrics.use(lambda file: file.write({"step": step, **row}))
        self._console.close()  # prints the last step before the account
        self._console.print_line(goodput_line(row))

    def print_line(self, text: str) -> None:
        if self._is_main:
            self._console.print_line(text)

    def close(self) -> None:
        """Show the last step and close the files; call it however the run ends."""
        if not self._is_main:
            return
        is_done = self._step >= self._last_step
        with ExitStack() as closing:  # in reverse order, each whatever the others raise
            closing.callback(self._trackers.close, is_done=is_done)
            if self._tensorboard is not None:
                closing.callback(self._tensorboard.close, TensorBoard.close)
            closing.callback(self._metrics.close, MetricsFile.close)
            closing.callback(self._console.close)


def _numbered(name: str, values: Sequence[float]) -> dict[str, Value]:
    """Return {<name>_<index>: value}, for TensorBoard, without NaN."""
    digits = len(str(len(values) - 1))  # so that cards are in order
    return {f"{name}_{i:0{digits}}": x for i, x in enumerate(values) if not math.isnan(x)}
