"""Write steps in the background, each as one atomic commit, with Orbax."""

import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxpipe.checkpoint.arrays import ITEM as ARRAYS
from maxpipe.checkpoint.arrays import Array
from maxpipe.checkpoint.policies import Retention
from maxpipe.checkpoint.record import FILE
from maxpipe.checkpoint.record import ITEM as RECORD
from maxpipe.devices import processes

_POLL_SECONDS = 0.02

if TYPE_CHECKING:
    import orbax.checkpoint as ocp


class OrbaxWriter:
    """Saves one step at a time; Orbax deletes steps that need not be kept after each commit.

    With several processes, Orbax would report an error of this process only after all others have
    finished the save, which they cannot do without it. Here `wait` raises the error at once, and
    does not wait for Orbax any more: the process has to tell the others and exit.

    `is_pending` says whether a save was started whose outcome `wait` has not reported. The
    background thread calls `on_written` just before it commits.
    """

    def __init__(self, directory: Path, retention: Retention, on_written: Callable[[], None]):
        self._directory = directory
        self._retention = retention
        self._on_written = on_written
        self._manager: ocp.CheckpointManager | None = None
        self._error: Exception | None = None  # this process's error, with several processes
        self.is_pending = False

    @property
    def is_open(self) -> bool:
        """Return whether a save was started since the writer was made or closed."""
        return self._manager is not None

    @property
    def is_running(self) -> bool:
        """Return whether a save is running in the background and has not failed in this process."""
        is_saving = self._manager is not None and self._manager.is_saving_in_progress()
        return is_saving and self._error is None

    def start(self, step: int, arrays: Mapping[str, Array], record: Mapping[str, object]) -> None:
        """Copy the arrays to host memory and start saving; may raise any Orbax error."""
        import orbax.checkpoint as ocp  # takes a second or more, which only a save should cost

        if self._manager is None:
            self._manager = self._make_manager()
        items = {ARRAYS: ocp.args.PyTreeSave(dict(arrays)), RECORD: ocp.args.JsonSave(record)}
        self.is_pending = True
        try:
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as error:
            self._note_error(error)
            raise

    def wait(self) -> None:
        """Wait until the last save is committed; raise its error, if any, once."""
        if self._manager is not None and self.is_pending:
            self._wait(self._manager)

    def close(self) -> None:
        """Wait for the last save and stop Orbax's threads; raise its error, if any, once."""
        manager, self._manager = self._manager, None
        if manager is not None:
            self._wait(manager)
            if self._error is None:
                manager.close()

    def _wait(self, manager: "ocp.CheckpointManager") -> None:
        was_pending, self.is_pending = self.is_pending, False
        if processes.count() > 1:
            while self._error is None and manager.is_saving_in_progress():
                time.sleep(_POLL_SECONDS)
        if self._error is None:
            manager.wait_until_finished()
        elif was_pending:
            raise self._error

    def _note_error(self, error: Exception) -> None:
        if processes.count() > 1:
            self._error = error

    def _make_manager(self) -> "ocp.CheckpointManager":
        import orbax.checkpoint as ocp

        note_error = self._note_error

        class Manager(ocp.CheckpointManager):
            """Orbax's manager, but it reports errors at once and does not ask about preemption.

            Orbax asks JAX's preemption service about the step being saved, also from the thread
            that commits it, while the training loop asks about later steps. The service takes the
            step of the latest question as the process's current one, so the processes would agree
            on a step that has passed.
            """

            def _wait_for_checkpointers(self) -> None:
                try:
                    super()._wait_for_checkpointers()
                except Exception as error:
                    note_error(error)
                    raise

            def reached_preemption(self, step: int) -> bool:
                return False

        leave_errors_to_the_caller()
        return Manager(
            self._directory,
            item_handlers={
                ARRAYS: ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False),
                RECORD: ocp.JsonCheckpointHandler(FILE),
            },
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self._retention,
                cleanup_tmp_directories=True,
                async_options=ocp.AsyncOptions(post_finalization_callback=self._on_written),
                # Damage in an old step's metadata must not prevent a new save.
                lightweight_initialize=True,
            ),
        )


@functools.cache
def leave_errors_to_the_caller() -> None:
    """Keep hundreds of lines of tracebacks of one failed save off the console, once per process.

    Orbax logs an error for every thread that fails on a full disk, and TensorStore prints one for
    each array whose result arrives after the event loop was closed. `wait` still raises the error.
    """
    logging.getLogger("absl").addFilter(
        lambda record: not (record.levelno == logging.ERROR and "orbax" in record.pathname)
    )

    def unless_late(hook: Callable[..., object]) -> Callable[..., None]:
        def report(*words: Any) -> None:
            error = words[1] if len(words) > 1 else words[0].exc_value
            if str(error) != "Event loop is closed":
                hook(*words)

        return report

    sys.excepthook = unless_late(sys.excepthook)
    sys.unraisablehook = unless_late(sys.unraisablehook)
