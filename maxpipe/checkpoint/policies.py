"""Decide when to save, and which steps to keep."""

import math
import time
from collections.abc import Callable, Mapping, Sequence

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointUnreadable
from maxpipe.checkpoint.record import Record
from maxpipe.config.sections import CheckpointConfig
from maxpipe.devices.processes import of_first_process

EVAL_LOSS = "eval_loss"  # in a checkpoint's meta: the loss of its state, or null


class SaveTimer:
    """Decides when a save is due: every `checkpoint.every` steps, and `checkpoint.every_minutes`
    after the last one.

    A save should take less than `checkpoint.grace_seconds`, because that is the time that a
    preempted run has for its last one.
    """

    def __init__(self, settings: CheckpointConfig, clock: Callable[[], float] = time.monotonic):
        self._every = settings.every
        self._interval = 60 * settings.every_minutes
        self._grace = settings.grace_seconds
        self._clock = clock
        self._last_save = clock()  # or the start of this process
        self._began: float | None = None  # start of the last save of this process
        self._duration: float | None = None  # seconds of the last finished save; None once compared

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step; every process calls this after every step."""
        is_late = False
        if self._interval:
            # Processes have different clocks and ask at different times, so process 0 decides.
            is_over = self._clock() - self._last_save >= self._interval
            is_late = bool(of_first_process(int(is_over)))
        return is_late or (self._every > 0 and step % self._every == 0)

    def began(self) -> None:
        self._last_save = self._began = self._clock()

    def finished(self) -> None:
        """Note that everything is saved; may be called by another thread."""
        if self._began is not None:  # the mirror may have copied an earlier process's step
            self._duration = self._clock() - self._began

    def warning(self) -> str:
        """Return a warning if the last save took longer than the grace period; else ""."""
        seconds, self._duration = self._duration, None
        if seconds is None or not 0 < self._grace < seconds:
            return ""
        self._grace = 0  # warn once
        problem = f"a checkpoint took {seconds:.1f} s, longer than checkpoint.grace_seconds allows"
        remedy = "save to faster storage, or more often to lose less"
        return f"{problem}: a preempted run would be killed before its last one is done; {remedy}"


class Retention:
    """Decides which steps to keep, by `checkpoint.{keep,keep_every,keep_best}`.

    Steps set aside are not committed, so they neither count nor are deleted.
    """

    def __init__(self, settings: CheckpointConfig, record_of: Callable[[int], Record]):
        self._settings = settings
        self._record_of = record_of
        self._losses: dict[int, float] = {}

    def note(self, step: int, meta: Mapping[str, object]) -> None:
        """Remember the evaluation loss in the meta of a step that is about to be saved."""
        self._losses[step] = _loss(meta)

    def kept(self, steps: Sequence[int]) -> set[int]:
        """Return which of `steps` to keep; the newest is always among them."""
        settings = self._settings
        steps = sorted(steps)
        kept = set(steps[-settings.keep :])
        if settings.keep_every:
            kept |= {step for step in steps if step % settings.keep_every == 0}
        if settings.keep_best:
            # What cannot be judged may be the best; it stays, and is asked again next time.
            known = {step: loss for step in steps if (loss := self._loss(step)) is not None}
            kept |= {step for step in steps if step not in known}
            good = [step for step, loss in known.items() if not math.isnan(loss)]
            # Of equal losses the newer step wins.
            kept |= set(sorted(good, key=lambda s: (known[s], -s))[: settings.keep_best])
        return kept

    def _loss(self, step: int) -> float | None:
        """Return a step's loss, NaN if it has none or is damaged, None if it cannot be read now."""
        if step not in self._losses:
            try:
                self._losses[step] = _loss(self._record_of(step).meta)
            except CheckpointDamaged:
                self._losses[step] = math.nan  # not known to be good
            except CheckpointUnreadable:
                return None
        return self._losses[step]


def _loss(meta: Mapping[str, object]) -> float:
    loss = meta.get(EVAL_LOSS)
    return float(loss) if isinstance(loss, int | float) else math.nan
