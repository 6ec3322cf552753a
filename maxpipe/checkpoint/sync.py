"""Copy steps to `checkpoint.mirror` in the background, and fetch lost ones."""

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import jax

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointSaveError, CheckpointUnreadable
from maxpipe.checkpoint.mirror import Mirror
from maxpipe.checkpoint.policies import Retention
from maxpipe.checkpoint.reader import in_all
from maxpipe.checkpoint.steps import COMMITTED, DAMAGED, UNFINISHED, StepsDirectory
from maxpipe.devices import processes
from maxpipe.storage.object_store import in_background

Result = TypeVar("Result")


class MirrorSync:
    """Keeps a mirror equal to a directory, one background update at a time, in process 0.

    No committed step may be deleted from the directory while an update runs. `retention` decides
    which steps are kept, in either place. The update's thread calls `on_success` when the mirror
    has all of them.
    """

    def __init__(
        self,
        directory: StepsDirectory,
        mirror: Mirror,
        retention: Retention,
        on_success: Callable[[], None],
        log: Callable[[str], None],
    ):
        self._directory, self._mirror, self._retention = directory, mirror, retention
        self._on_success, self._log = on_success, log
        self._update: Future[None] | None = None
        self._attempted: int | None = None  # newest step of an update that has not succeeded

    @property
    def is_running(self) -> bool:
        return self._update is not None and not self._update.done()

    def start(self) -> None:
        """Start an update if the mirror lacks a kept step and the last update has not just failed.

        `wait` must have been called after the previous update.
        """
        local = self._directory.steps()
        newest = max(local, default=None)
        if jax.process_index() != 0 or newest == self._attempted:
            return
        # A process may have been killed after the newest step, which it copies first.
        if self._retention.kept(local).issubset(self._mirror.steps()):
            return
        self._attempted = newest
        self._update = in_background(self._bring_up_to_date, "mirror")

    def wait(self) -> None:
        """Wait for an update if one was started; raise CheckpointSaveError once if it failed."""
        update, self._update = self._update, None
        if update is None:
            return
        try:
            update.result()
        except Exception as error:
            raise CheckpointSaveError(
                f"copying checkpoints to {self._mirror} failed: {type(error).__name__}: {error}; "
                f"they are safe in {self._directory}"
            ) from error
        self._attempted = None

    def read(self, step: int, read: Callable[[], Result]) -> Result:
        """Return `read()` of a step in the directory, fetched first if it is lost or damaged there.

        Every process calls this. Raises as `read`, and as `Mirror.download`.
        """
        is_local = processes.of_first_process(int(step in self._directory.steps()))
        is_mirrored = processes.of_first_process(int(step in self._mirror.steps()))
        if is_local:
            try:
                return read()
            except CheckpointDamaged as error:
                if not is_mirrored:
                    raise
                self._log(str(error))
        if is_mirrored:
            self._log(f"fetching checkpoint {step} from {self._mirror}")
            in_all(partial(self._fetch_in_first, step), f"{self._mirror}/{step}")
        return read()

    def _fetch_in_first(self, step: int) -> None:
        if jax.process_index() != 0:
            return
        scratch = self._directory.scratch(step, "fetched")
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            self._mirror.download(step, scratch)
            if step in self._directory.steps():
                self._directory.set_aside(step, DAMAGED)
            scratch.rename(self._directory.of(step))
        except OSError as error:
            reason = f"its copy cannot be put into {self._directory}: {error}"
            raise CheckpointUnreadable(f"{self._mirror}/{step}", reason) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _bring_up_to_date(self) -> None:
        local = self._directory.steps()
        kept = self._retention.kept([*{*local, *self._mirror.steps()}])
        missing = kept.intersection(local).difference(self._mirror.steps())
        for step in sorted(missing, reverse=True):
            self._mirror.upload(step, self._directory.of(step))
        self._on_success()
        try:
            for entry in self._mirror.entries():
                is_dropped = entry.state == COMMITTED and entry.step not in kept
                if entry.state == UNFINISHED or is_dropped:
                    self._mirror.delete(entry.step)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._log(f"older checkpoints in {self._mirror} could not be deleted: {reason}")
