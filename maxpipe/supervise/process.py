"""Keep a process in hand from start to end: signals, deadlines, leases, an account of time.

A trainer under a supervisor also tells it, in the file named by MAXPIPE_PROGRESS, how far it is,
and learns from MAXPIPE_DOWNTIME how long its run was down. Imports no JAX.
"""

import faulthandler
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import TelemetryConfig
from maxpipe.config.terminal import at_end
from maxpipe.devices.cluster import Sizes, job_of_process
from maxpipe.storage.lease import Lease, LeaseDirectory, LeaseLost, LeasePlace, Owner, acquire
from maxpipe.storage.local_files import write_atomically
from maxpipe.storage.object_store import explained
from maxpipe.storage.records import Damaged, parse_record, read_record
from maxpipe.supervise.ending import Interruption, leave, saying_if_possible
from maxpipe.telemetry.profiling import TimeAccount
from maxpipe.telemetry.prometheus import Prometheus

if TYPE_CHECKING:  # takes time to import, and most runs have none
    from maxpipe.checkpoint.mirror import Mirror

PROGRESS, DOWNTIME, MEMORY = "MAXPIPE_PROGRESS", "MAXPIPE_DOWNTIME", "MAXPIPE_MEMORY"
STATUS_FILE = "supervisor.json"  # in the run's directory, written by supervisor 0
HUNG = 124

_WRITE_SECONDS = 1.0
# Limit of a step after a request to stop, if earlier steps took less than a third of it.
_HURRIED_SECONDS = 30.0
_SLOWER = 3.0  # else this many times the slowest step before
_POLL_SECONDS = 1.0  # costs less than waking the thread at every step


class Progress(NamedTuple):
    """How far a trainer is."""

    attempt: int = 0
    run: str = ""  # the run's directory, once it is known
    step: int = 0  # the last finished step; 0 before the first one of this process
    at: float = 0.0  # when it was finished, by the machine's clock
    sizes: Sizes | None = None  # with which the run may go on, once they are known


class ProgressFile:
    """Writes the progress of this process for its supervisor; without one its calls do nothing."""

    def __init__(self, path: Path | None = None, attempt: int = 0):
        self.is_read = path is not None
        self._path, self._progress = path, Progress(attempt)

    def finished(self, step: int) -> None:
        """Report that a step is finished; written once a second at most."""
        if (now := time.time()) - self._progress.at >= _WRITE_SECONDS:
            self.tell(step=step, at=now)

    def tell(self, **changes: Any) -> None:
        """Report changes of `Progress`. A failed write does not stop training."""
        self._progress = self._progress._replace(**changes)
        if self._path is not None:
            text = json.dumps(self._progress._asdict(), default=asdict)
            with suppress(OSError):
                # Not durable: it is written between steps, and need not outlive the machine.
                write_atomically(self._path, [text.encode()], durable=False)


def read_progress(path: Path) -> Progress:
    """Return the progress that a trainer has written, an empty one if it has not."""
    with suppress(Damaged):
        return read_record(path, Progress)
    return Progress()


@contextmanager
def running(
    work: Callable[[threading.Event], object], name: str, patience: float | None = None
) -> Iterator[None]:
    """Run `work` in a thread, and at the end set the event that it gets and wait for it."""
    closed = threading.Event()
    thread = threading.Thread(target=work, args=(closed,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join(patience)


class Watchdog:
    """Ends the run with exit code 124 and all stacks when this process makes no progress.

    Inert without a thread that runs `watch`; limits of 0 s are none.
    """

    def __init__(
        self,
        startup_seconds: float = 0,  # to the first `progress`
        step_seconds: float = 0,  # from each to the next one
        clock: Callable[[], float] = time.monotonic,  # stops while the machine sleeps
    ):
        self._step, self._clock = step_seconds, clock
        self._since, self._last, self._before_step = clock(), "the start", False
        self._allowed, self._key = startup_seconds, "telemetry.startup_deadline_seconds"
        self._slowest_step, self._hurried_at = 0.0, math.inf

    def progress(self, what: str, *, before_step: bool = True) -> None:
        """Restart the clock after `what`, such as "step 12"; next comes a step, or else a save."""
        now = self._clock()
        if self._before_step:
            self._slowest_step = max(self._slowest_step, now - self._since)
        # The clock first: the thread that watches must not hold old times to new limits.
        self._since = now
        self._last, self._key = what, "telemetry.step_deadline_seconds"
        self._before_step, self._allowed = before_step, self._step

    def hurry(self) -> None:
        """Shorten the limit of steps after the first: who asks to stop may not wait for it."""
        self._hurried_at = min(self._hurried_at, self._clock())

    def overdue(self) -> str:
        """Return why the process hangs; "" if it does not."""
        key, allowed = self._key, self._allowed or math.inf
        if self._before_step and self._hurried_at < math.inf:
            passed = max(0.0, self._hurried_at - self._since)  # before the request
            hurried = passed + max(_HURRIED_SECONDS, _SLOWER * self._slowest_step)
            if hurried < allowed:
                key, allowed = "asked to stop", hurried
        if self._clock() - self._since <= allowed:
            return ""
        return f"nothing has happened for {allowed:.4g} s since {self._last} ({key})"

    def watch(self, closed: threading.Event) -> None:
        while not closed.wait(_POLL_SECONDS):
            if reason := self.overdue():
                stream = sys.__stderr__ or sys.stderr
                with saying_if_possible():
                    what = f"\nhung: {reason}; stacks of all threads follow, exit code {HUNG}"
                    print(what, file=stream, flush=True)
                    faulthandler.dump_traceback(stream, all_threads=True)
                leave(HUNG, reason)


class RunLease(NamedTuple):
    """Leases of a run's directory, then of its mirror; without leases its calls do nothing."""

    leases: Sequence[Lease] = ()

    @property
    def lost(self) -> str:
        """Why one is lost, or ""."""
        return next(filter(None, (lease.lost for lease in self.leases)), "")

    def check(self) -> None:
        """Raise `LeaseLost` if a renewal has found a place gone or with another owner; cheap."""
        if self.lost:
            raise LeaseLost(self.lost)

    def verify(self) -> None:
        """Look at the directory now; raises as `check`."""
        for lease in self.leases[:1]:
            lease.verify()
        self.check()


@contextmanager
def own_run(
    root: Path, mirror: "Mirror | None", job: tuple[str, int], log: Callable[[str], None]
) -> Iterator[RunLease]:
    """Own a run's directory and mirror up to the end of the context or process.

    A directory that is made here is removed at the end if it is empty. Raises ConfigError if a live
    process owns one of them, or it cannot be written to.
    """
    owner = Owner.this_process(*job)

    def own(place: LeasePlace) -> Lease:
        lease = acquire(place, owner, log)
        stack.enter_context(at_end(lease.release))
        return lease

    def remove_empty() -> None:
        with suppress(OSError):
            for directory in missing:
                directory.rmdir()

    missing = [path for path in (root, *root.parents) if not path.exists()]
    with ExitStack() as stack:
        stack.callback(remove_empty)
        try:
            leases = [own(LeaseDirectory(root))]
        except OSError as error:
            message = f"cannot write to {root}: {error.strerror}"
            raise ConfigError(Problem("output_dir", message)) from error
        if mirror is not None:
            with explained(mirror.url, "checkpoint.mirror", "written to"):
                leases.append(own(mirror.lease_place()))
        yield RunLease(leases)


@dataclass(frozen=True)
class Supervision:
    """Signals, deadlines, time accounting, leases and endpoint of a process; inert by default."""

    interruption: Interruption = field(default_factory=Interruption)
    watchdog: Watchdog = field(default_factory=Watchdog)
    time: TimeAccount = field(default_factory=TimeAccount)
    lease: RunLease = field(default_factory=RunLease)
    owns_process: bool = True  # the run may end it; false in a program that calls the run
    progress: ProgressFile = field(default_factory=ProgressFile)
    # Seconds until the previous trainer had ended, and until this one began, if any.
    downtime: Mapping[str, float] = field(default_factory=dict)
    memory: Path | None = None  # the supervisor's directory in memory
    prometheus: Prometheus = field(default_factory=Prometheus)

    def finished_step(self, step: int) -> None:
        self.interruption.begin()
        self.watchdog.progress(f"step {step}")
        self.progress.finished(step)


@contextmanager
def supervise_process(telemetry: TelemetryConfig) -> Iterator[Supervision]:
    """Supervise this process; to be called in its main thread, before JAX is started."""
    watchdog = Watchdog(telemetry.startup_deadline_seconds, telemetry.step_deadline_seconds)
    path, memory = os.environ.get(PROGRESS), os.environ.get(MEMORY)
    downtime = {}
    with suppress(ValueError):
        detection, ended = parse_record(os.environ.get(DOWNTIME, ""), list[float])
        downtime = {"detection": detection, "restart": max(0.0, time.time() - ended)}
    with Interruption(watchdog.hurry) as interruption, running(watchdog.watch, "watchdog"):
        yield Supervision(
            interruption,
            watchdog,
            progress=ProgressFile(Path(path) if path else None, job_of_process()[1]),
            downtime=downtime,
            memory=Path(memory) if memory else None,
        )
