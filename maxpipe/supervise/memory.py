"""Keep replicas in memory, outside of the trainers: a directory of each supervisor, and its copies.

The directory, see `maxpipe.checkpoint.replicas`, outlives a trainer and ends with its supervisor.
`partner` in it copies the `own` of the previous supervisor among those that take part. A supervisor
that begins with an empty memory, such as on a host that replaces a lost one, first fetches its own
steps back.

The council's order to start holds the addresses of the memories and a secret for them. Who asks
names a part and the steps it has; the answer is a line of JSON, step -> file -> size, and the files
of the steps that were not named, the oldest step first. Imports no JAX.
"""

import fcntl
import json
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path

from maxpipe.checkpoint.steps import COPIED, OWN, PARTNER, remove_step
from maxpipe.storage.local_files import write_atomically
from maxpipe.storage.records import Damaged, parse_record
from maxpipe.supervise.secret import CALLER, listening, prove

_SHARED = Path("/dev/shm")  # in memory on every Linux
_PREFIX, _LOCK = "maxpipe-replicas-", ".lock"
_LOOK_SECONDS = 0.25
_REACH_SECONDS = 10.0  # to reach a partner that does not have its order yet
_TIMEOUT_SECONDS = 10.0
_MAX_LINE = 10_000_000  # bytes; names and sizes of the files of all steps
_PIECE = 1 << 20  # bytes
_NAME = re.compile(r"[0-9a-f]+/\d+")  # name of a step: its run and its number

ERRORS = (OSError, Damaged)  # of a supervisor that cannot be reached, ends, or answers strangely
Steps = dict[str, dict[str, int]]  # step -> file -> bytes


def hold(directory: Path) -> None:
    """Make a directory in memory, again if it was removed; raises OSError without space."""
    directory.mkdir(mode=0o700, exist_ok=True)
    directory.chmod(0o700)  # whoever has made it again first


@contextmanager
def shared_memory() -> Iterator[Path]:
    """Yield a new directory in memory, removed at the end, or by the next owner after a kill."""
    parent = _SHARED if os.access(_SHARED, os.W_OK) else Path(tempfile.gettempdir())
    # The owner of each directory locks a file beside it, and the lock ends with the process.
    for file in parent.glob(f"{_PREFIX}*{_LOCK}"):
        with suppress(OSError), file.open("rb") as lock:  # others' cannot be opened, or are locked
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(file.with_suffix(""), ignore_errors=True)
            file.unlink()
    # Others may remove the file, such as systemd's RemoveIPC, which Python's own `delete` minds.
    with tempfile.NamedTemporaryFile(
        prefix=_PREFIX, suffix=_LOCK, dir=parent, delete=False
    ) as owned:
        directory = Path(owned.name).with_suffix("")
        try:
            fcntl.flock(owned, fcntl.LOCK_EX)
            hold(directory)
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            Path(owned.name).unlink(missing_ok=True)


def names_in(part: Path) -> set[str]:
    names = {path.relative_to(part).as_posix() for path in part.glob("*/*")}
    return set(filter(_NAME.fullmatch, names))


def copy_new_steps(
    address: str, word: str, part: str, target: Path, ended: threading.Event
) -> None:
    """Make `target` equal to a part of another memory, always keeping at least one of its steps.

    A part without steps changes nothing: its supervisor has just begun. Raises one of `ERRORS`.
    """
    held = names_in(target)
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_TIMEOUT_SECONDS) as connection:
        prove(connection, word, CALLER)
        connection.settimeout(_TIMEOUT_SECONDS)
        connection.sendall(json.dumps([part, *sorted(held)]).encode() + b"\n")
        with connection.makefile("rb") as answer:
            steps = parse_record(answer.readline(_MAX_LINE), Steps)
            wanted = set(filter(_NAME.fullmatch, steps))
            for name in _oldest_first(wanted - held):
                # Make room first, as long as a step remains that the source has.
                if names_in(target) & wanted:
                    _remove(target, names_in(target) - wanted)
                scratch = target / f"{name}.unfinished"
                try:
                    _receive(answer, steps[name], scratch, ended)
                    scratch.rename(target / name)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
    if wanted:
        _remove(target, names_in(target) - wanted)


class Partners:
    """Serves a supervisor's memory to the others, and copies the previous supervisor's.

    Each attempt has a thread, which first waits for that of the attempt before to end its copy.
    """

    def __init__(self, memory: Path, index: int):
        self._memory, self._index = memory, index
        self._members: list[int] = []  # of the last attempt
        self._word = ""  # without one nobody is served
        self._telling = threading.Lock()  # of the word, and of the file `copied`
        self._ended = threading.Event()  # replaced for each attempt
        self._thread: threading.Thread | None = None

    @contextmanager
    def serving(self, host: str) -> Iterator[int]:
        """Serve at an address of this machine, and end all at the end; yield the port."""
        with listening(host, 0, lambda: self._word, self._answer) as port:
            try:
                yield port
            finally:
                self.rest()
                if self._thread is not None:
                    self._thread.join(_TIMEOUT_SECONDS)

    def rest(self) -> None:
        """Serve and follow no one until the next attempt in which this supervisor takes part."""
        self._ended.set()
        with self._telling:
            self._word = ""

    def begin(
        self, addresses: Mapping[int, str], word: str, *, forgets: bool = False
    ) -> threading.Event:
        """Begin to serve and follow those who take part, in order, given supervisor -> address.

        `forgets` if the steps here are of another history than the others'. Returns an event that
        is set when the memory is ready for the trainer, with its lost steps.
        """
        self.rest()
        before, ready = self._thread, threading.Event()
        self._ended = ended = threading.Event()
        members = [*addresses]

        def serve() -> None:
            if before is not None:
                before.join()
            try:
                self._forget(members, forgets=forgets)
                if len(members) < 2:
                    return  # alone, or among others without memory
                with self._telling:
                    if ended.is_set():
                        return
                    self._word = word
                position = members.index(self._index)
                after = members[(position + 1) % len(members)]
                self._fetch(addresses[after], word, ended)
            except OSError:  # without room, or a directory, nothing is copied or waited for
                return
            finally:
                ready.set()
            previous = addresses[members[position - 1]]
            while not ended.wait(_LOOK_SECONDS):
                # The source may have ended, and another one may have its place.
                with suppress(*ERRORS):
                    copy_new_steps(previous, word, OWN, self._memory / PARTNER, ended)

        self._thread = threading.Thread(target=serve, name="partner", daemon=True)
        self._thread.start()
        return ready

    def _forget(self, members: list[int], *, forgets: bool) -> None:
        """Remove steps from another history, and copies from supervisors other than these."""
        is_changed = forgets or (bool(self._members) and members != self._members)
        self._members = members
        for part, has_others in ((OWN, forgets), (PARTNER, is_changed)):
            if has_others:
                _remove(self._memory / part, names_in(self._memory / part))
        copied = self._memory / COPIED
        if is_changed or (len(members) > 1 and not copied.exists()):
            write_atomically(copied, [b"[]"])

    def _fetch(self, partner: str, word: str, ended: threading.Event) -> None:
        """Fetch this supervisor's steps back from its partner if none are here.

        What comes in time appears together: who follows this supervisor must not see only some.
        """
        own, fetched = self._memory / OWN, self._memory / "fetched"
        until = time.monotonic() + _REACH_SECONDS
        while not names_in(own) and time.monotonic() < until and not ended.is_set():
            try:
                copy_new_steps(partner, word, PARTNER, fetched, ended)
                break
            except ERRORS:  # it does not have its order yet
                ended.wait(_LOOK_SECONDS)
        if names_in(fetched) and not ended.is_set():
            shutil.rmtree(own, ignore_errors=True)
            fetched.rename(own)
        shutil.rmtree(fetched, ignore_errors=True)  # the next attempt fetches all

    def _answer(self, connection: socket.socket, word: str) -> None:
        with connection, suppress(*ERRORS), connection.makefile("rwb") as stream:
            connection.settimeout(_TIMEOUT_SECONDS)
            part, *held = parse_record(stream.readline(_MAX_LINE), list[str]) or [""]
            if part not in (OWN, PARTNER):
                return
            directory = self._memory / part
            steps: Steps = {name: {} for name in names_in(directory)}
            lacking = _oldest_first(steps.keys() - held)
            for name in lacking:
                files = [path for path in (directory / name).rglob("*") if path.is_file()]
                sizes = {path.relative_to(directory / name): path.stat().st_size for path in files}
                steps[name] = {path.as_posix(): size for path, size in sizes.items()}
            stream.write(json.dumps(steps).encode() + b"\n")
            with self._telling:
                if part == OWN and word == self._word:  # still
                    write_atomically(self._memory / COPIED, [json.dumps(held).encode()])
            for name in lacking:
                for path, size in steps[name].items():
                    with (directory / name / path).open("rb") as file:
                        _copy(file, stream, size, self._ended)


def _oldest_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (int(name.rpartition("/")[2]), name))


def _receive(
    answer: BufferedIOBase, files: Mapping[str, int], step: Path, ended: threading.Event
) -> None:
    for name, size in files.items():
        (step / name).parent.mkdir(parents=True, exist_ok=True)
        with (step / name).open("wb") as copy:
            _copy(answer, copy, size, ended)


def _copy(
    source: BufferedIOBase, target: BufferedIOBase, size: int, ended: threading.Event
) -> None:
    """Copy `size` bytes; raises `Damaged` if there are fewer, or if the attempt has ended."""
    while size > 0:
        piece = source.read(min(size, _PIECE))
        if not piece or ended.is_set():
            raise Damaged("one side has ended")
        target.write(piece)
        size -= len(piece)


def _remove(part: Path, names: Iterable[str]) -> None:
    for name in names:
        remove_step(part / name)
