"""Write steps in the background, each as one atomic commit, with Orbax's V1 API.

Orbax's manager of steps is not used: it asks JAX's preemption service about the step being saved,
also while it commits, when the training loop asks about later steps. The service takes the step of
the latest question as the process's current one, so the processes would agree on a past step.
"""

import functools
import json
import logging
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxpipe.checkpoint.arrays import ITEM as ARRAYS
from maxpipe.checkpoint.arrays import Array
from maxpipe.checkpoint.policies import Retention
from maxpipe.checkpoint.record import FILE
from maxpipe.checkpoint.record import ITEM as RECORD
from maxpipe.checkpoint.steps import UNFINISHED, StepsDirectory
from maxpipe.devices import processes
from maxpipe.storage.object_store import in_background

if TYPE_CHECKING:
    from orbax.checkpoint import v1 as ocp


class OrbaxWriter:
    """Saves one step at a time; after each commit process 0 deletes steps that need not be kept.

    With several processes, `wait` raises an error of this process at once, while the others wait
    for it: the process has to tell them and exit.

    `is_open` says whether a save was started since the writer was made or closed. The background
    thread calls `on_written` after the commit.
    """

    def __init__(
        self, directory: StepsDirectory, retention: Retention, on_written: Callable[[], None]
    ):
        self._directory = directory
        self._retention = retention
        self._on_written = on_written
        self._save: Future[None] | None = None
        self.is_open = False

    @property
    def is_pending(self) -> bool:
        """Return whether a save was started whose outcome `wait` has not reported."""
        return self._save is not None

    @property
    def is_running(self) -> bool:
        """Return whether a save is running in the background and has not failed in this process."""
        return self._save is not None and not self._save.done()

    def start(self, step: int, arrays: Mapping[str, Array], record: Mapping[str, object]) -> None:
        """Copy the arrays to host memory and start saving; may raise any Orbax error."""
        from orbax.checkpoint import v1 as ocp  # takes a second or more, which only a save may cost

        leave_errors_to_the_caller()
        if not self.is_open and processes.index() == 0:
            for entry in self._directory.entries():
                if entry.state == UNFINISHED:  # the remains of a killed process
                    shutil.rmtree(self._directory.path / entry.name, ignore_errors=True)
        self.is_open = True
        context = ocp.Context()
        context.array.saving.use_ocdbt = True
        context.array.saving.use_zarr3 = False  # the zarr that `arrays.load` reads
        items = {ARRAYS: dict(arrays), RECORD: RecordFile(record)}
        with context:
            response = ocp.save_checkpointables_async(self._directory.of(step), items)
        self._save = in_background(functools.partial(self._finish, response), "save")

    def wait(self) -> None:
        """Wait until the last save is committed; raise its error, if any, once."""
        save, self._save = self._save, None
        if save is not None:
            save.result()

    def close(self) -> None:
        """Wait as `wait` does; raises its error, if any, once."""
        self.is_open = False
        self.wait()

    def _finish(self, response: "ocp.AsyncResponse[None]") -> None:
        response.result()
        self._on_written()
        if processes.index() == 0:
            steps = self._directory.steps()
            for step in sorted({*steps} - self._retention.kept(steps)):
                self._directory.remove(step)


class RecordFile:
    """A record in the form in which Orbax saves it with the arrays: a `StatefulCheckpointable`."""

    def __init__(self, record: Mapping[str, object]):
        self._text = json.dumps(record)

    async def save(self, directory: "ocp.path.PathAwaitingCreation") -> Awaitable[None]:
        return self.write(directory)

    async def write(self, directory: "ocp.path.PathAwaitingCreation") -> None:
        """Write the file in the background, in process 0, once it has made the directory."""
        path = Path(await directory.await_creation())
        if processes.index() == 0:
            (path / FILE).write_text(self._text)

    async def load(self, directory: "ocp.path.PathAwaitingCreation") -> Awaitable[None]:
        raise NotImplementedError("`record.step_record` reads it")


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
