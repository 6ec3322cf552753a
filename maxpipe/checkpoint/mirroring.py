"""`checkpoint.mirror`: the object store follows the directory, and gives back what the directory has lost."""

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import jax

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointSaveError, CheckpointUnreadable
from maxpipe.checkpoint.mirror import Mirror
from maxpipe.checkpoint.reader import Restored
from maxpipe.checkpoint.retention import Retention
from maxpipe.checkpoint.steps import (
    COMMITTED,
    DAMAGED,
    UNFINISHED,
    committed_steps,
    set_aside,
    step_path,
)
from maxpipe.devices import processes

_FETCHED, _DAMAGED, _FAILED = range(3)


class Mirroring:
    """Brings the mirror up to date in the background, one update at a time; process 0 does it for all.

    Nothing may delete committed steps from the directory while an update runs.

    Args:
      directory: of the committed steps; all processes see the same one.
      mirror: of them.
      retention: which steps are kept, in either place.
    """

    def __init__(self, directory: Path, mirror: Mirror, retention: Retention):
        self._mirror = mirror
        self._directory = directory
        self._retention = retention
        self._update: Future[str] | None = None
        self._attempted: int | None = (
            None  # the newest step when the last update began, unless that has succeeded
        )

    @property
    def is_running(self) -> bool:
        """Whether an update is on its way."""
        return self._update is not None and not self._update.done()

    def start(self, finished: Callable[[], None]) -> None:
        """Starts an update if the newest step is not in the mirror, and has not just failed to get there.

        The update before must have been waited for.

        Args:
          finished: called by the update's thread when all is in the mirror.
        """
        assert self._update is None
        newest = max(committed_steps(self._directory), default=None)
        if jax.process_index() != 0 or newest in (None, self._attempted, *self._mirror.steps()):
            return
        self._update, self._attempted = Future(), newest
        threading.Thread(
            target=self._run, args=(self._update, finished), name="mirror", daemon=True
        ).start()

    def wait(self) -> str:
        """Waits for the update if one was started; returns a warning, or nothing.

        Raises:
          CheckpointSaveError: it has failed; reported once.
        """
        update, self._update = self._update, None
        if update is None:
            return ""
        try:
            warning = update.result()
        except Exception as error:
            raise CheckpointSaveError(
                f"copying checkpoints to {self._mirror.url} failed: {type(error).__name__}: {error}; "
                f"they are safe in {self._directory}"
            ) from error
        self._attempted = None
        return warning

    def read(self, step: int, read: Callable[[], Restored], say: Callable[[str], None]) -> Restored:
        """What `read` makes of a step in the directory; the mirror's copy takes the place of a lost or damaged one.

        Raises:
          CheckpointDamaged: neither copy is sound.
          CheckpointUnreadable: the one that may be sound cannot be read here.
        """
        is_here = processes.of_first_process(int(step in committed_steps(self._directory)))
        is_mirrored = processes.of_first_process(int(step in self._mirror.steps()))
        if is_here:
            try:
                return read()
            except CheckpointDamaged as error:
                if not is_mirrored:
                    raise
                say(f"checkpoint {step} in {self._directory} is damaged: {error}")
        if is_mirrored:
            say(f"fetching checkpoint {step} from {self._mirror.url}")
            self._fetch_for_all(step)
        return read()

    def _fetch_for_all(self, step: int) -> None:
        outcome = _FETCHED
        failure: Exception | None = None
        if jax.process_index() == 0:
            try:
                self._fetch(step)
            except CheckpointDamaged as error:
                outcome, failure = _DAMAGED, error
            # Every store has errors of its own; none of them says that the checkpoint is damaged.
            except Exception as error:
                outcome, failure = _FAILED, error
        outcome = processes.of_first_process(outcome)
        if outcome == _DAMAGED:
            raise CheckpointDamaged(
                f"{self._mirror.url}: {failure or 'damaged, as process 0 found'}"
            ) from failure
        if outcome == _FAILED:
            why = f"{type(failure).__name__}: {failure}" if failure else "process 0 failed"
            raise CheckpointUnreadable(
                f"its copy in {self._mirror.url} cannot be fetched: {why}"
            ) from failure
        if not processes.agree(step_path(self._directory, step).is_dir()):
            raise CheckpointUnreadable(
                "only some processes see it: all of them have to share the file system"
            )

    def _fetch(self, step: int) -> None:
        # The name makes Orbax delete what a killed process leaves.
        scratch = self._directory / f"{step}.orbax-checkpoint-tmp-fetched"
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            self._mirror.download(step, scratch)
            if step in committed_steps(self._directory):
                set_aside(self._directory, step, DAMAGED)
            scratch.rename(step_path(self._directory, step))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _run(self, update: "Future[str]", finished: Callable[[], None]) -> None:
        try:
            said = self._bring_up_to_date()
        except Exception as error:
            update.set_exception(error)
        else:
            finished()
            update.set_result(said)

    def _bring_up_to_date(self) -> str:
        """Uploads what is kept, the newest first, then deletes what is not; returns why it could not be deleted."""
        here = committed_steps(self._directory)
        kept = self._retention.kept([*{*here, *self._mirror.steps()}])
        for step in sorted(kept.intersection(here).difference(self._mirror.steps()), reverse=True):
            self._mirror.upload(step, step_path(self._directory, step))
        try:
            for entry in self._mirror.entries():
                if entry.state == UNFINISHED or (
                    entry.state == COMMITTED and entry.step not in kept
                ):
                    self._mirror.delete(entry.step)
        except Exception as error:
            return f"older checkpoints in {self._mirror.url} could not be deleted: {type(error).__name__}: {error}"
        return ""
