"""Supervise a process from start to end: signals, deadlines, leases, an account of time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from maxpipe.config.sections import TelemetryConfig
from maxpipe.supervise.memory import memory_of_process
from maxpipe.supervise.progress import (
    Downtime,
    ProgressFile,
    downtime_of_process,
    progress_file_of_process,
)
from maxpipe.supervise.run_lease import RunLease
from maxpipe.supervise.signals import Interruption
from maxpipe.supervise.watchdog import Watchdog
from maxpipe.telemetry.profiling import TimeAccount


@dataclass(frozen=True)
class Supervision:
    """Signals, deadlines, time accounting and leases of a process; inert by default."""

    interruption: Interruption = field(default_factory=Interruption)
    watchdog: Watchdog = field(default_factory=Watchdog)
    time: TimeAccount = field(default_factory=TimeAccount)
    lease: RunLease = field(default_factory=RunLease)
    owns_process: bool = True  # the run may end it; false in a program that calls the run
    progress: ProgressFile = field(default_factory=ProgressFile)
    downtime: Downtime = field(default_factory=Downtime)
    memory: Path | None = None  # the supervisor's directory in memory

    def finished_step(self, step: int) -> None:
        """Restart the clock of the watchdog, and make signals wait for the next step and a save."""
        self.interruption.begin()
        self.watchdog.progress(f"step {step}")
        self.progress.finished(step)


@contextmanager
def supervise_process(telemetry: TelemetryConfig) -> Iterator[Supervision]:
    """Supervise this process; to be called in its main thread, before JAX is started."""
    watchdog = Watchdog(telemetry.startup_deadline_seconds, telemetry.step_deadline_seconds)
    with Interruption(watchdog.hurry) as interruption, watchdog:
        yield Supervision(
            interruption,
            watchdog,
            TimeAccount(),
            progress=progress_file_of_process(),
            downtime=downtime_of_process(),
            memory=memory_of_process(),
        )


@contextmanager
def supervise_in_program() -> Iterator[Supervision]:
    """Supervise a run within a program, such as a notebook, whose process it must not end.

    There are no deadlines: the program may keep a run waiting, and only the end of the process
    would end a hang. In a thread other than the main one, signals are left to the program.
    """
    with Interruption(ends_process=False) as interruption:
        yield Supervision(interruption, time=TimeAccount(), owns_process=False)
