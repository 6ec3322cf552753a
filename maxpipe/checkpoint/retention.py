"""`checkpoint.every_minutes`: whether the last save is long ago, by one clock for all processes.

`checkpoint.{keep,keep_every,keep_best}`: which committed steps are kept when a newer one is
committed."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointUnreadable
from maxpipe.checkpoint.record import Record
from maxpipe.config.sections import CheckpointConfig
from maxpipe.devices import processes


class Interval:
    """Whether so many seconds have passed; every process gets the same answer.

    Clocks differ between machines, and so does the moment at which each of them asks: process 0
    decides.

    Args:
      seconds: length of the interval; 0 = it is never over.
      clock: seconds, never going back.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._seconds = seconds
        self._clock = clock
        self._since = clock()

    def restart(self) -> None:
        """The interval begins now."""
        self._since = self._clock()

    def is_over(self) -> bool:
        """Whether it is over; with several processes all of them ask."""
        if not self._seconds:
            return False
        return bool(processes.of_first_process(int(self._clock() - self._since >= self._seconds)))


EVAL_LOSS = "eval_loss"  # in a checkpoint's meta: of the very state that it holds, or null


class Retention:
    """A preservation policy for Orbax.

    Orbax asks it when a save starts, with the new step among the others, and deletes what it does
    not keep once that step is committed. Steps set aside are not committed, so that they neither
    count nor are deleted.

    Args:
      settings: `checkpoint.*`.
      record_of: the record of a committed step; raises as `read_record`.
    """

    def __init__(self, settings: CheckpointConfig, record_of: Callable[[int], Record]):
        self._settings = settings
        self._record_of = record_of
        self._losses: dict[int, float] = {}

    def note(self, step: int, meta: dict[str, Any]) -> None:
        """Takes the evaluation loss from the meta of a step that is about to be saved."""
        self._losses[step] = _loss(meta)

    def kept(self, steps: Sequence[int]) -> set[int]:
        """The steps to keep of those in `steps`, the newest always among them."""
        settings, steps = self._settings, sorted(steps)
        kept = set(steps[-settings.keep :])
        if settings.keep_every:
            kept |= {step for step in steps if step % settings.keep_every == 0}
        if settings.keep_best:
            losses = {step: self._loss(step) for step in steps}
            # Of equal ones the newer is better.
            ranked = sorted(
                (step for step in steps if not math.isnan(losses[step])),
                key=lambda s: (losses[s], -s),
            )
            kept |= set(ranked[: settings.keep_best])
        return kept

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax's `PreservationPolicy`: one answer for each checkpoint."""
        kept = self.kept([checkpoint.step for checkpoint in checkpoints])
        return [checkpoint.step in kept for checkpoint in checkpoints]

    def _loss(self, step: int) -> float:
        if step not in self._losses:
            try:
                self._losses[step] = _loss(self._record_of(step).meta)
            except (CheckpointDamaged, CheckpointUnreadable):
                self._losses[step] = math.nan  # whatever it is, it is not known to be good
        return self._losses[step]


def _loss(meta: dict[str, Any]) -> float:
    """The evaluation loss, NaN if there is none."""
    loss = meta.get(EVAL_LOSS)
    return math.nan if loss is None else float(loss)
