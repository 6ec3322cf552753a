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

    All processes see the same directory. No committed step may be deleted from it while an update
    runs. `retention` decides which steps are kept, in either place.
    """

    def __init__(self, directory: StepsDirectory, mirror: Mirror, retention: Retention):
        self._directory = directory
        self._mirror = mirror
        self._retention = retention
        self._update: Future[str] | None = None
        self._attempted: int | None = None  # newest step of an update that has not succeeded

    @property
    def is_running(self) -> bool:
        """Return whether an update is running."""
        return self._update is not None and not self._update.done()

    def start(self, on_success: Callable[[], None]) -> None:
        """Start an update if the mirror lacks a kept step and the last update has not just failed.

        `wait` must have been called after the previous update. The update's thread calls
        `on_success` when the mirror has all kept steps.
        """
        assert self._update is None
        local = self._directory.steps()
        newest = max(local, default=None)
        if jax.process_index() != 0 or newest == self._attempted:
            return
        # A process may have been killed after the newest step, which it copies first.
        if self._retention.kept(local).issubset(self._mirror.steps()):
            return
        self._attempted = newest
        self._update = in_background(partial(self._bring_up_to_date, on_success), "mirror")

    def wait(self) -> str:
        """Wait for an update if one was started; return a warning or "".

        Raises:
          CheckpointSaveError: the update has failed; raised once.
        """
        update, self._update = self._update, None
        if update is None:
            return ""
        try:
            warning = update.result()
        except Exception as error:
            raise CheckpointSaveError(
                f"copying checkpoints to {self._mirror} failed: {type(error).__name__}: {error}; "
                f"they are safe in {self._directory}"
            ) from error
        self._attempted = None
        return warning

    def read(self, step: int, read: Callable[[], Result], log: Callable[[str], None]) -> Result:
        """Return `read()` of a step in the directory, fetched first if it is lost or damaged there.

        Every process calls this.

        Raises:
          CheckpointDamaged: neither copy is sound.
          CheckpointUnreadable: a copy that may be sound cannot be read here.
        """
        is_local = processes.of_first_process(int(step in self._directory.steps()))
        is_mirrored = processes.of_first_process(int(step in self._mirror.steps()))
        if is_local:
            try:
                return read()
            except CheckpointDamaged as error:
                if not is_mirrored:
                    raise
                log(f"checkpoint {step} in {self._directory} is damaged: {error}")
        if is_mirrored:
            log(f"fetching checkpoint {step} from {self._mirror}")
            in_all(partial(self._fetch_in_first, step), "its copy")
            if not processes.agree(self._directory.of(step).is_dir()):
                raise CheckpointUnreadable(
                    "only some processes see it: all of them have to share the file system"
                )
        return read()

    def _fetch_in_first(self, step: int) -> None:
        """Fetch a step in process 0; the others do nothing."""
        if jax.process_index() != 0:
            return
        # Orbax deletes directories with such names, and so the remains of a killed process.
        scratch = self._directory.path / f"{step}.orbax-checkpoint-tmp-fetched"
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            self._mirror.download(step, scratch)
            if step in self._directory.steps():
                self._directory.set_aside(step, DAMAGED)
            scratch.rename(self._directory.of(step))
        except OSError as error:
            message = f"its copy in {self._mirror} cannot be put into {self._directory}: {error}"
            raise CheckpointUnreadable(message) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _bring_up_to_date(self, on_success: Callable[[], None]) -> str:
        """Upload kept steps, the newest first, then delete the others; return a warning or ""."""
        local = self._directory.steps()
        kept = self._retention.kept([*{*local, *self._mirror.steps()}])
        missing = kept.intersection(local).difference(self._mirror.steps())
        for step in sorted(missing, reverse=True):
            self._mirror.upload(step, self._directory.of(step))
        on_success()
        try:
            for entry in self._mirror.entries():
                is_dropped = entry.state == COMMITTED and entry.step not in kept
                if entry.state == UNFINISHED or is_dropped:
                    self._mirror.delete(entry.step)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            return f"older checkpoints in {self._mirror} could not be deleted: {reason}"
        return ""
