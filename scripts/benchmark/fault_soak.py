"""Watch whether supervisors and trainers grow while faults come and go."""

import os
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from supervised_run import Processes, wait_until

ENDS_SUPERVISORS = ("full disk", "supervisor killed", "first host killed", "lost host")
SETTLED_STEPS = 20  # after a restart, before a trainer is looked at
STOPPED = 75
GROWTH = 1.1  # of memory that does not count
MORE = 1  # descriptors or threads that do not count


class Usage(NamedTuple):
    """What a process holds: megabytes of memory, open descriptors, and threads."""

    megabytes: float
    descriptors: int
    threads: int

    def __str__(self) -> str:
        return f"{self.megabytes:.0f} MB, {self.descriptors} descriptors, {self.threads} threads"


def usage_of(pid: int) -> Usage:
    """Return what a process holds now; raises OSError if it has ended."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in status)
    kilobytes, threads = values["VmRSS"].split()[0], values["Threads"]
    return Usage(int(kilobytes) / 1e3, len(os.listdir(f"/proc/{pid}/fd")), int(threads))


class Samples:
    """Collect what supervisors and trainers hold, by name."""

    def __init__(self) -> None:
        self.of: dict[str, list[Usage]] = {}

    def take(self, processes: Processes) -> None:
        """Look at all processes once the run has gone on for some steps."""
        aim = processes.highest_step() + SETTLED_STEPS
        wait_until(lambda: processes.highest_step() >= aim, processes)
        for index, supervisor in enumerate(processes.pids):
            pids = {"supervisor": supervisor, "trainer": processes.trainer(index)}
            for name, pid in pids.items():
                if pid is not None:
                    self.of.setdefault(f"{name} {index}", []).append(usage_of(pid))

    def lines(self) -> list[str]:
        """Return a line for each process: what it held in the first third, and in the last."""
        return [
            f"{name}: {first}; later {last}"
            for name, usages in self.of.items()
            for first, last in [ends(usages)]
        ]

    def growing(self) -> list[str]:
        """Return the names of processes that hold more than in the beginning."""
        return [name for name, usages in self.of.items() if grows(*ends(usages))]


def ends(usages: Sequence[Usage]) -> tuple[Usage, Usage]:
    """Return the medians of the first third and of the last third."""
    third = max(1, len(usages) // 3)
    first, last = (
        Usage(*map(statistics.median, zip(*part, strict=True)))
        for part in (usages[:third], usages[-third:])
    )
    return first, last


def grows(first: Usage, last: Usage) -> bool:
    """Return whether a process holds clearly more later than at first."""
    return (
        last.megabytes > GROWTH * first.megabytes
        or last.descriptors > first.descriptors + MORE
        or last.threads > first.threads + MORE
    )


def stop(processes: Processes) -> list[str]:
    """Ask a supervisor to stop the run; return what is wrong with how it ends."""
    os.kill(processes.pids[0], signal.SIGTERM)
    codes = processes.wait_until_ended()
    return [] if {*codes} == {STOPPED} else [f"asked to stop, it ended with {codes}"]
