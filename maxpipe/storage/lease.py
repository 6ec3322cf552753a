"""Lease a place to one owner at a time, which shows that it lives by renewing its lease.

A lease is one small file or object, `lease.json`, that names its owner. Whoever creates it owns the
place, renews it every `RENEW_SECONDS` and removes it at the end. A killed process leaves it. The
next start takes over at once from a process of the same machine that has ended, or from an earlier
attempt of its job; otherwise after `LEASE_SECONDS` in which it has not seen the lease renewed.

Creating is atomic: O_EXCL in a file system (also on NFS and Lustre), a conditional write in an
object store. Imports no JAX.
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
from typing import TYPE_CHECKING, Any, Self

from maxpipe.config.errors import ConfigError, Problem
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


class LeaseLost(RuntimeError):
    """The place is gone, or another process has taken it over."""


class LeaseDirectory:
    """A place in a file system; the directory is made by the first `create`."""

    def __init__(self, path: Path):
        self._path, self._shown = Path(path).absolute(), str(path)
        self._first: os.stat_result | None = None  # of the directory, when it was first used

    def __str__(self) -> str:
        return self._shown

    def read(self, name: str) -> Entry | None:
        path, absent = self._path / name, (FileNotFoundError, NotADirectoryError)
        # Opening a file makes NFS ask the server.
        with suppress(*absent), path.open(encoding="utf-8", errors="replace") as file:
            return file.read(), os.fstat(file.fileno()).st_mtime
        return None

    def create(self, name: str, text: str) -> bool:
        """Create a file or object atomically; return false if there is one already."""
        self._path.mkdir(parents=True, exist_ok=True)
        self._first, path = self._first or self._path.stat(), self._path / name
        with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(text)
            return True
        return False

    def renew(self, name: str, text: str) -> None:
        """Set the time of the last change of a file or object that holds `text`."""
        os.utime(self._path / name)  # needs no room on a full disk

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def is_gone(self) -> bool:
        """Return whether the place itself was deleted or moved since its first `create`."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return self._first is None or not os.path.samestat(self._path.stat(), self._first)
        return True


class LeaseObjects:
    """A place, such as s3://bucket/runs/base, in an object store with conditional writes."""

    def __init__(self, url: str, store: "AbstractFileSystem", deadline: Deadline):
        self._url, self._store, self._deadline = url.rstrip("/"), store, deadline

    def __str__(self) -> str:
        return self._url

    def read(self, name: str) -> Entry | None:
        with suppress(FileNotFoundError):
            content, changed = self._ask("cat_file", name), self._ask("modified", name)
            return content.decode(errors="replace"), changed.timestamp()
        return None

    def create(self, name: str, text: str) -> bool:
        # Some stores ignore the condition of the write.
        if not self._ask("exists", name):
            with suppress(FileExistsError):
                self._ask("pipe_file", name, text.encode(), mode="create")
                return True
        return False

    def renew(self, name: str, text: str) -> None:
        self._ask("pipe_file", name, text.encode(), mode="overwrite")

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._ask("rm_file", name)

    def is_gone(self) -> bool:
        return False  # an object store has no directories

    def _ask(self, method: str, name: str, *values: bytes, **options: str) -> Any:
        call = getattr(self._store, method)
        return self._deadline.wait(call, f"{self._url}/{name}", *values, **options)


LeasePlace = LeaseDirectory | LeaseObjects


@dataclass(frozen=True)
class Owner:
    """A start of a run, as its lease names it."""

    # The defaults are of an unknown owner, whose lease has to expire.
    start: str = ""  # identifies this start
    host: str = "an unknown host"
    machine: str = ""  # distinguishes machines, boots and containers of the same name
    pid: int = 0
    process_started: int = 0  # in clock ticks since boot; 0 where it is unknown
    since: str = "an unknown time"  # local time at which the owner asked for the place
    job: str = ""  # that its scheduler or launcher starts again
    attempt: int = 0  # grows with every attempt of the job

    @classmethod
    def this_process(cls, job: str = "", attempt: int = 0) -> Self:
        pid, since = os.getpid(), datetime.now().astimezone().isoformat(" ", "seconds")
        start, started = secrets.token_hex(8), start_of_process(pid) or 0
        return cls(start, platform.node(), machine(), pid, started, since, job, attempt)

    @classmethod
    def parse(cls, text: str) -> Self:
        with suppress(Damaged):
            return parse_record(text, cls)
        return cls()

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class Lease:
    """Owns a place until `release`; made by `acquire`."""

    def __init__(self, place: LeasePlace, owner: Owner):
        self._place, self._text = place, owner.to_json()
        self.lost = ""  # why the last look found the lease gone, or with another owner
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def verify(self) -> None:
        """Renew the lease now, or set `lost`; a store that does not answer is asked again."""
        with suppress(Exception):
            entry = self._place.read(NAME)
            if entry is None and not self._place.is_gone():
                self._place.create(NAME, self._text)  # only the lease was deleted
            elif entry is None:
                why = "was deleted or moved while this run was writing to it; it has ended"
                self.lost = f"{self._place} {why}"
            elif entry[0] != self._text:
                self.lost = f"{self._place} was taken over by {Owner.parse(entry[0])}"
            else:
                self._place.renew(NAME, self._text)

    def release(self) -> None:
        """Stop renewing, and remove the lease if it is this owner's and the store answers."""
        self._closed.set()
        self._thread.join(_RELEASE_SECONDS)

    def _keep(self) -> None:
        while not self.lost and not self._closed.wait(RENEW_SECONDS):
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
    """Return the lease of a place; ConfigError if a live process owns it.

    `log` receives a line before a wait and after a takeover.
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
        message = f"{place} is in use by {holder}: wait until it has ended, stop it, or choose "
        in_use = ConfigError(Problem("run_name", f"{message}another run_name"))
        if (owner.host, owner.machine) == (holder.host, holder.machine):
            if _is_alive(holder):
                raise in_use
            reason = "which has ended"
        elif owner.job and owner.job == holder.job and owner.attempt > holder.attempt:
            reason = f"an earlier attempt of job {owner.job}"
        else:
            if watched is None:
                watched, limit = entry, f"waiting up to {LEASE_SECONDS:.0f} s"
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


def _is_alive(owner: Owner) -> bool:
    """Return whether an owner on this machine runs, or may run."""
    try:
        return start_of_process(owner.pid) == owner.process_started
    except OSError:  # such as another user's that is hidden, or too many open files
        return True


def start_of_process(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, 0 without /proc; None if ended.

    Raises OSError if this cannot be found out.
    """
    try:
        if not Path("/proc/self/stat").exists():
            os.kill(pid, 0)
            return 0
        # The name of the program, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == b"Z" else int(fields[19])
