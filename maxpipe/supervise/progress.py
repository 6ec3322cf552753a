"""Tell a supervisor how far its trainer is, and a trainer how long its run was down.

The first in the file named by MAXPIPE_PROGRESS, the second in MAXPIPE_DOWNTIME. Imports no JAX.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from maxpipe.devices.cluster import Sizes, job_of_process
from maxpipe.storage.local_files import write_atomically
from maxpipe.storage.records import Damaged, parse_record, read_record

PROGRESS = "MAXPIPE_PROGRESS"
DOWNTIME = "MAXPIPE_DOWNTIME"
STATUS_FILE = "supervisor.json"  # in the run's directory, written by supervisor 0

_WRITE_SECONDS = 1.0


@dataclass(frozen=True)
class Progress:
    """How far a trainer is."""

    attempt: int = 0  # of its job
    run: str = ""  # the run's directory, once it is known
    step: int = 0  # number of finished steps; 0 before the first one of this process
    at: float = 0.0  # when that step was finished, by the machine's clock
    sizes: Sizes | None = None  # with which the run may go on, once they are known


@dataclass(frozen=True)
class Downtime:
    """How long a run was down before this process began, in seconds."""

    detection: float = 0.0  # from the last step of the previous attempt to the end of its trainer
    restart: float = 0.0  # from then to the start of this process

    def to_dict(self) -> dict[str, float]:
        """Return cause -> seconds; empty if the run was not down."""
        return asdict(self) if self != Downtime() else {}


class ProgressFile:
    """Writes the progress of this process for its supervisor; without one its calls do nothing."""

    def __init__(
        self,
        path: Path | None = None,
        attempt: int = 0,
        clock: Callable[[], float] = time.time,
    ):
        self._path = path
        self._progress = Progress(attempt)
        self._clock = clock

    @property
    def is_read(self) -> bool:
        """Return whether there is a supervisor that reads this."""
        return self._path is not None

    def may_go_on(self, sizes: Sizes) -> None:
        """Report with how many processes the run may go on."""
        self._tell(replace(self._progress, sizes=sizes))

    def run_directory(self, run: Path) -> None:
        """Report the run's directory, once it exists."""
        self._tell(replace(self._progress, run=str(run.resolve())))

    def finished(self, step: int) -> None:
        """Report that a step is finished; written once a second at most."""
        now = self._clock()
        if now - self._progress.at >= _WRITE_SECONDS:
            self._tell(replace(self._progress, step=step, at=now))

    def _tell(self, progress: Progress) -> None:
        self._progress = progress
        if self._path is not None:
            # A failed write is no reason to stop training: the supervisor only knows less.
            with suppress(OSError):
                text = json.dumps(asdict(progress))
                # Not durable: it is written between steps, and need not outlive the machine.
                write_atomically(self._path, [text.encode()], durable=False)


def progress_file_of_process() -> ProgressFile:
    """Return the progress file that this process's supervisor has named."""
    path = os.environ.get(PROGRESS)
    return ProgressFile(Path(path) if path else None, job_of_process()[1])


def read_progress(path: Path) -> Progress:
    """Return the progress that a trainer has written, an empty one if it has not."""
    with suppress(Damaged):
        return read_record(path, Progress)
    return Progress()


def downtime_variable(progress: Progress, ended: float) -> str:
    """Return the value of MAXPIPE_DOWNTIME for the trainer after one that ended at a time."""
    detection = ended - progress.at if progress.at else 0.0
    return json.dumps((max(0.0, detection), ended))


def downtime_of_process() -> Downtime:
    """Return the downtime of the run before this process, zero without a supervisor."""
    with suppress(ValueError):
        detection, ended = parse_record(os.environ.get(DOWNTIME, ""), list[float])
        return Downtime(detection, max(0.0, time.time() - ended))
    return Downtime()
