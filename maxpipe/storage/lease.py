"""Lease a place to one owner at a time, which shows that it lives by renewing its lease.

A lease is one small file or object, `lease.json`, that names its owner. Whoever creates it owns the
place. The owner renews it every `RENEW_SECONDS` from a thread and removes it at the end. A process
that is killed leaves it. The next start then takes over:

- at once, if the owner ran on the same machine and its process has ended, or if the owner was an
  earlier attempt of the same job;
- otherwise once it has watched the lease for `LEASE_SECONDS` without seeing it renewed.

Creating is atomic: O_EXCL in a file system (also on NFS and Lustre), a conditional write in an
object store. To take over, a process first creates a guard, so that only one of several can. A host
that is cut off for longer than the lease loses it, and notices when it renews. Imports no JAX.
"""

import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self

from maxpipe.storage.object_store import Deadline
from maxpipe.storage.records import Damaged, parse_record

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

NAME = "lease.json"
RENEW_SECONDS = 5.0
LEASE_SECONDS = 30.0

_GUARD = f"{NAME}.taking"
_RELEASE_SECONDS = 4.0  # a process that ends waits no longer
_LOOK_SECONDS = 1.0  # between two looks at another host's lease
_RIVAL_SECONDS = 0.1  # between two tries to take over while another process does so

Entry = tuple[str, float]  # a text, and the time of its last change, which renewing moves on


class PlaceInUse(RuntimeError):
    """Another live process owns the place."""


class LeaseLost(RuntimeError):
    """The place is gone, or another process has taken it over."""


class LeaseDirectory:
    """A place in a file system; the directory is made by the first `create`."""

    def __init__(self, path: Path):
        self._path, self._shown = Path(path).absolute(), str(path)

    def __str__(self) -> str:
        return self._shown

    def read(self, name: str) -> Entry | None:
        """Return a file or object, or None if there is none."""
        path, absent = self._path / name, (FileNotFoundError, NotADirectoryError)
        # Opening a file makes NFS ask the server.
        with suppress(*absent), path.open(encoding="utf-8", errors="replace") as file:
            return file.read(), os.fstat(file.fileno()).st_mtime
        return None

    def create(self, name: str, text: str) -> bool:
        """Create a file or object atomically; return false if there is one already."""
        self._path.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), (self._path / name).open("x", encoding="utf-8") as file:
            file.write(text)
            return True
        return False

    def renew(self, name: str, text: str) -> None:
        """Set the time of the last change of a file or object that holds `text`."""
        os.utime(self._path / name)  # needs no room on a full disk

    def remove(self, name: str) -> None:
        """Remove a file or object; do nothing if there is none."""
        with suppress(FileNotFoundError, NotADirectoryError):
            (self._path / name).unlink()


class LeaseObjects:
    """A place in an object store with conditional writes; its methods raise the store's errors.

    `url` is such as `s3://bucket/runs/base`; the store may be silent until the deadline.
    """

    def __init__(self, url: str, store: "AbstractFileSystem", deadline: Deadline):
        self._url, self._store, self._deadline = url.rstrip("/"), store, deadline

    def __str__(self) -> str:
        return self._url

    def read(self, name: str) -> Entry | None:
        path = f"{self._url}/{name}"
        with suppress(FileNotFoundError):
            content = self._deadline.wait(self._store.cat_file, path)
            changed = self._deadline.wait(self._store.modified, path).timestamp()
            return content.decode(errors="replace"), changed
        return None

    def create(self, name: str, text: str) -> bool:
        # Some stores ignore the condition of the write.
        if self._deadline.wait(self._store.exists, f"{self._url}/{name}"):
            return False
        with suppress(FileExistsError):
            self._write(name, text, "create")
            return True
        return False

    def renew(self, name: str, text: str) -> None:
        self._write(name, text, "overwrite")

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._deadline.wait(self._store.rm_file, f"{self._url}/{name}")

    def _write(self, name: str, text: str, mode: str) -> None:
        path = f"{self._url}/{name}"
        self._deadline.wait(self._store.pipe_file, path, text.encode(), mode=mode)


LeasePlace = LeaseDirectory | LeaseObjects


@dataclass(frozen=True)
class Owner:
    """A start of a run, as its lease names it."""

    start: str  # identifies this start
    host: str  # name of the machine
    machine: str  # distinguishes machines, boots and containers of the same name
    pid: int  # process number on the machine
    process_started: int  # in clock ticks since boot; 0 where it is unknown
    since: str  # local time at which the owner asked for the place
    job: str = ""  # that its scheduler or launcher starts again
    attempt: int = 0  # grows with every attempt of the job

    @classmethod
    def this_process(cls, job: str = "", attempt: int = 0) -> Self:
        """Return a new start in this process."""
        pid, since = os.getpid(), datetime.now().astimezone().isoformat(" ", "seconds")
        started = start_of_process(pid) or 0
        return cls(
            secrets.token_hex(8), platform.node(), machine(), pid, started, since, job, attempt
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the owner that a lease names, or an unknown one."""
        with suppress(Damaged):
            return parse_record(text, cls)
        return cls("", "an unknown host", "", 0, 0, "an unknown time")

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class Lease:
    """Owns a place until `release`; made by `acquire`."""

    def __init__(self, place: LeasePlace, owner: Owner):
        self._place, self._text = place, owner.to_json()
        self._lost = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        return self._lost != ""

    def check(self) -> None:
        """Raise `LeaseLost` if the last renewal found the lease gone, or with another owner."""
        if self._lost:
            raise LeaseLost(self._lost)

    def verify(self) -> None:
        """Renew the lease now; raises as `check`. An error of the store changes nothing."""
        # A store that does not answer for a while is asked again.
        with suppress(Exception):
            entry = self._place.read(NAME)
            if entry is None:
                why = "was deleted or moved while this run was writing to it; it has ended"
                self._lost = f"{self._place} {why}"
            elif entry[0] != self._text:
                self._lost = f"{self._place} was taken over by {Owner.parse(entry[0])}"
            else:
                self._place.renew(NAME, self._text)
        self.check()

    def release(self) -> None:
        """Stop renewing, and remove the lease if it is this owner's and the store answers."""
        self._closed.set()
        self._thread.join(_RELEASE_SECONDS)

    def _keep(self) -> None:
        while not self._lost and not self._closed.wait(RENEW_SECONDS):
            with suppress(LeaseLost):
                self.verify()
        self._closed.wait()
        with suppress(Exception):
            entry = self._place.read(NAME)
            if entry is not None and entry[0] == self._text:
                self._place.remove(NAME)


def acquire(
    place: LeasePlace,
    owner: Owner,
    log: Callable[[str], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease:
    """Return the lease of a place; watch it for `LEASE_SECONDS` first if its owner may be dead.

    `log` receives a line before a wait and after a takeover. Raises `PlaceInUse`.
    """
    watched: Entry | None = None
    waited = blocked = 0.0
    while not place.create(NAME, owner.to_json()):
        entry = place.read(NAME)
        if entry is None:
            continue
        holder = Owner.parse(entry[0])
        if holder == owner:
            break  # the answer to an earlier `create` was lost
        in_use = PlaceInUse(f"{place} is in use by {holder}")
        if (owner.host, owner.machine) == (holder.host, holder.machine):
            if start_of_process(holder.pid) == holder.process_started:
                raise in_use
            reason = "which has ended"
        elif owner.job and owner.job == holder.job and owner.attempt > holder.attempt:
            reason = f"an earlier attempt of job {owner.job}"
        else:
            if watched is None:
                watched = entry
                limit = f"waiting up to {LEASE_SECONDS:.0f} s"
                log(f"{place} is leased to {holder}: {limit} to see whether that process lives")
            if entry != watched:
                raise in_use
            if waited < LEASE_SECONDS:
                sleep(_LOOK_SECONDS)
                waited += _LOOK_SECONDS
                continue
            reason = f"which has not renewed its lease for {LEASE_SECONDS:.0f} s"
        if _take_over(place, entry, owner):
            log(f"{place}: taken over from {holder}, {reason}")
            break
        sleep(_RIVAL_SECONDS)
        blocked += _RIVAL_SECONDS
        if blocked > LEASE_SECONDS:
            place.remove(_GUARD)  # of a process that was killed while it took over
    return Lease(place, owner)


def _take_over(place: LeasePlace, entry: Entry, owner: Owner) -> bool:
    """Replace a dead owner's lease, if it is still as in `entry`; return whether this was done."""
    if not place.create(_GUARD, ""):
        return False
    try:
        if place.read(NAME) != entry:
            return False
        place.remove(NAME)
        return place.create(NAME, owner.to_json())
    finally:
        place.remove(_GUARD)


def machine() -> str:
    """Return a text that is equal for two processes only if they see each other's numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def start_of_process(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it has ended.

    Without /proc it is 0 for a process that runs.
    """
    try:
        if not Path("/proc/self/stat").exists():
            os.kill(pid, 0)
            return 0
        # The name of the program, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except PermissionError:  # another user's
        return 0
    except OSError:
        return None
    return None if fields[0] == b"Z" else int(fields[19])
