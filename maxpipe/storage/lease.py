"""Lease a place to one owner at a time, which proves that it lives by renewing its lease.

A lease is one small file or object, `lease.json`, that names its owner. Whoever creates it owns the
place. The owner renews it every `RENEW_SECONDS` from a thread and removes it at the end. A process
that is killed leaves it. The next start then takes over:

- at once, if the owner ran on the same machine and its process has ended, or if the owner was an
  earlier attempt of the same job;
- otherwise when the lease has not been renewed for `LEASE_SECONDS`, by the clock of the store.

Creating is atomic: a hard link or O_EXCL in a file system, a conditional write in an object store.
To take over, a process first creates a guard that names the old owner, so that only one of several
can. This holds on local file systems, on NFS and on Lustre. A host that a network failure cuts off
for longer than the lease loses it; it notices when it renews. Imports no JAX.
"""

import contextlib
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

from maxpipe.storage.lease_places import Entry, LeasePlace
from maxpipe.storage.records import parse_record

NAME = "lease.json"
RENEW_SECONDS = 5.0
LEASE_SECONDS = 30.0

_RELEASE_SECONDS = 4.0  # a process that ends waits no longer
_LOOK_SECONDS = 1.0  # between two looks at another host's lease


class PlaceInUse(RuntimeError):
    """Another live process owns the place."""


class LeaseLost(RuntimeError):
    """The place is gone, or another process has taken it over."""


@dataclass(frozen=True)
class Owner:
    """A start of a run, as its lease names it.

    Attributes:
      start: identifies this start.
      host: name of the machine.
      machine: distinguishes machines, boots and containers of the same name.
      pid: process number on the machine.
      process_started: start time of the process in clock ticks since boot; 0 where it is unknown.
      since: local time at which the owner asked for the place.
      job: identifies a job that its scheduler or launcher starts again; "" if unknown.
      attempt: grows with every attempt of the job.
    """

    start: str
    host: str
    machine: str
    pid: int
    process_started: int
    since: str
    job: str = ""
    attempt: int = 0

    @classmethod
    def this_process(cls, job: str = "", attempt: int = 0) -> Self:
        """Return a new start in this process."""
        return cls(
            start=secrets.token_hex(8),
            host=platform.node(),
            machine=_machine(),
            pid=os.getpid(),
            process_started=_start_of_process(os.getpid()) or 0,
            since=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
            job=job,
            attempt=attempt,
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the owner that a lease names; an unknown one if the text names none."""
        with contextlib.suppress(ValueError):
            owner = parse_record(text, cls)
            if owner.start.isalnum():  # it becomes part of a file's name
                return owner
        return cls(f"unreadable-{len(text)}", "an unknown host", "", 0, 0, "an unknown time")

    def to_json(self) -> str:
        """Return the text of a lease."""
        return json.dumps(asdict(self)) + "\n"

    def shares_machine_with(self, other: "Owner") -> bool:
        """Return whether process numbers mean the same to both."""
        return (self.host, self.machine) == (other.host, other.machine)

    def is_alive(self) -> bool:
        """Return whether the process, which ran on this machine, still runs."""
        started = _start_of_process(self.pid)
        return started is not None and started == self.process_started

    def succeeds(self, other: "Owner") -> bool:
        """Return whether this is a later attempt of the same job: the other one has ended then."""
        return self.job != "" and self.job == other.job and self.attempt > other.attempt

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class Lease:
    """Owns a place until `release`; made by `acquire`.

    Args:
      place: the place that holds this owner's lease.
      owner: the owner that the lease names.
    """

    def __init__(self, place: LeasePlace, owner: Owner):
        self._place = place
        self._owner = owner
        self._lost = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_closed, name="lease", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        """Return whether `check` would raise."""
        return self._lost != ""

    def check(self) -> None:
        """Return at once if the last renewal found the lease sound.

        Raises:
          LeaseLost: the place is gone or has another owner.
        """
        if self._lost:
            raise LeaseLost(self._lost)

    def verify(self) -> None:
        """Renew the lease now; raises as `check`. An error of the store changes nothing."""
        self._try_to_renew()
        self.check()

    def release(self) -> None:
        """Stop renewing, and remove the lease if it is still this owner's.

        A store that fails now, or does not answer for a few seconds, leaves a lease that expires.
        """
        self._closed.set()
        remover = threading.Thread(target=self._remove, name="lease", daemon=True)
        remover.start()
        remover.join(_RELEASE_SECONDS)

    def _remove(self) -> None:
        self._thread.join()
        with contextlib.suppress(Exception):
            entry = self._place.read(NAME)
            if entry is not None and entry.text == self._owner.to_json():
                self._place.remove(NAME)

    def _renew_until_closed(self) -> None:
        while not self._lost and not self._closed.wait(RENEW_SECONDS):
            self._try_to_renew()

    def _try_to_renew(self) -> None:
        # A store that does not answer for a while is asked again.
        with contextlib.suppress(Exception):
            self._renew()

    def _renew(self) -> None:
        text = self._owner.to_json()
        entry = self._place.read(NAME)
        if entry is None and self._place.is_gone():
            self._lost = (
                f"{self._place} was deleted or moved while this run was writing to it; it has ended"
            )
        elif entry is None:
            self._place.create(NAME, text)
        elif entry.text != text:
            self._lost = f"{self._place} was taken over by {Owner.parse(entry.text)}"
        else:
            self._place.renew(NAME, text)


def acquire(
    place: LeasePlace,
    owner: Owner,
    log: Callable[[str], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease:
    """Return the lease of a place; wait for up to `LEASE_SECONDS` if its owner may be dead.

    Args:
      place: where the lease lies; created if it does not exist.
      owner: this start.
      log: function that receives a line before a wait and after a takeover.
      sleep: function that waits for a number of seconds.

    Raises:
      PlaceInUse: the owner is alive.
    """
    first_seen: Entry | None = None
    waited = 0.0
    while not place.create(NAME, owner.to_json()):
        entry = place.read(NAME)
        if entry is None:
            continue
        holder = Owner.parse(entry.text)
        if holder.start == owner.start:
            break  # the answer to an earlier `create` was lost
        if owner.shares_machine_with(holder):
            if holder.is_alive():
                raise _in_use(place, holder)
            reason = "which has ended"
        elif owner.succeeds(holder):
            reason = f"an earlier attempt of job {owner.job}"
        else:
            if first_seen is None:
                first_seen = entry
                waited = max(0.0, _now(place, owner) - entry.changed)
                if waited < LEASE_SECONDS:
                    log(
                        f"{place} is leased to {holder}: waiting up to {LEASE_SECONDS - waited:.0f}"
                        " s to see whether that process lives"
                    )
            if entry != first_seen:
                raise _in_use(place, holder)
            if waited < LEASE_SECONDS:
                sleep(_LOOK_SECONDS)
                waited += _LOOK_SECONDS
                continue
            reason = f"which has not renewed its lease for {LEASE_SECONDS:.0f} s"
        if _take_over(place, entry, holder, owner):
            log(f"{place}: taken over from {holder}, {reason}")
            break
        sleep(_LOOK_SECONDS / 10)
    return Lease(place, owner)


def _take_over(place: LeasePlace, entry: Entry, holder: Owner, owner: Owner) -> bool:
    """Replace a dead owner's lease; return whether it was still as in `entry`."""
    guard = f"{NAME}.{holder.start}"
    if not place.create(guard, owner.to_json()):
        rival = place.read(guard)
        # A process that was killed while it took over leaves its guard.
        if rival is not None and _now(place, owner) - rival.changed > LEASE_SECONDS:
            place.remove(guard)
        return False
    try:
        if place.read(NAME) != entry:
            return False
        place.replace(NAME, owner.to_json())
    finally:
        place.remove(guard)
    return True


def _now(place: LeasePlace, owner: Owner) -> float:
    """Return the time of the store's clock, which hosts with other clocks share."""
    name = f"{NAME}.{owner.start}"
    place.create(name, "")
    entry = place.read(name)
    place.remove(name)
    return entry.changed if entry else 0.0


def _in_use(place: LeasePlace, holder: Owner) -> PlaceInUse:
    return PlaceInUse(f"{place} is in use by {holder}")


def _machine() -> str:
    """Return a text that is equal for two processes only if they see each other's numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def _start_of_process(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it has ended.

    Without /proc it is 0 for a process that runs.
    """
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return 0
        return 0
    try:
        # The name of the program, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])
