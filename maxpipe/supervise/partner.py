"""Copy replicas between the memories of supervisors, so that the loss of a host loses none.

The directory in memory of each supervisor has two parts. `own` is its trainer's: the steps that
`maxpipe.checkpoint.replicas` writes. `partner` is a copy of the `own` of the previous supervisor
among those that take part; the first one copies the last one's. A supervisor serves both parts to
the others, and asks the previous one for new steps several times a second; `copied` tells its
trainer which of its steps the partner has. A supervisor that begins with an empty memory, such as
on a host that replaces a lost one, first fetches its own steps back from its partner.

The council's order to start holds the addresses of the memories and a secret for them. Who asks
names the steps it has; the answer is a line of JSON, step -> file -> size, and the files of the
steps that were not named, the oldest step first. Imports no JAX.
"""

import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from io import BufferedIOBase
from pathlib import Path, PurePosixPath
from typing import Self

from maxpipe.checkpoint.steps import COPIED, OWN, PARTNER, remove_step
from maxpipe.storage.local_files import write_atomically
from maxpipe.storage.records import Damaged, parse_record
from maxpipe.supervise.secret import CALLER, Listener, prove

_LOOK_SECONDS = 0.25
_REACH_SECONDS = 10.0  # to reach a partner that does not have its order yet
_TIMEOUT_SECONDS = 10.0
_MAX_LINE = 10_000_000  # bytes; names and sizes of the files of all steps
_PIECE = 1 << 20  # bytes
_NAME = re.compile(r"[0-9a-f]+/\d+")  # name of a step: its run and its number

ERRORS = (OSError, Damaged)  # of a supervisor that cannot be reached, ends, or answers strangely
Steps = dict[str, dict[str, int]]  # step -> file -> bytes


@dataclass(frozen=True)
class Request:
    """What a supervisor asks of another one: the steps in a part of its memory that it lacks."""

    part: str  # `OWN` or `PARTNER`
    held: Sequence[str]  # names of the steps that it has


@dataclass(frozen=True)
class Source:
    """One part of the memory of another supervisor."""

    address: str  # HOST:PORT
    word: str
    part: str  # `OWN` or `PARTNER`
    ended: threading.Event = field(default_factory=threading.Event)  # ends every copy


def names_in(part: Path) -> set[str]:
    """Return the steps in one part of a memory."""
    names = {path.relative_to(part).as_posix() for path in part.glob("*/*")}
    return set(filter(_NAME.fullmatch, names))


def copy_new_steps(source: Source, target: Path) -> None:
    """Make one part of a memory equal to a source, always keeping at least one of its steps.

    A source without steps changes nothing: its supervisor has just begun.

    Raises:
      One of `ERRORS`: the source cannot be reached, or has just removed a step.
    """
    held = names_in(target)
    request = json.dumps(asdict(Request(source.part, sorted(held))))
    host, _, port = source.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_TIMEOUT_SECONDS) as connection:
        prove(connection, source.word, CALLER)
        connection.settimeout(_TIMEOUT_SECONDS)
        connection.sendall(request.encode() + b"\n")
        with connection.makefile("rb") as answer:
            steps = parse_record(answer.readline(_MAX_LINE), Steps)
            wanted = set(filter(_NAME.fullmatch, steps))
            for name in _oldest_first(wanted - held):
                # Make room first, as long as a step remains that the source has.
                if names_in(target) & wanted:
                    _remove(target, names_in(target) - wanted)
                scratch = target / f"{name}.unfinished"
                shutil.rmtree(scratch, ignore_errors=True)
                try:
                    _receive(answer, steps[name], scratch, source.ended)
                    scratch.rename(target / name)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
    if wanted:
        _remove(target, names_in(target) - wanted)


class Partners:
    """Serves a supervisor's memory to the others, and copies the previous supervisor's.

    Each attempt has a thread, which first waits for the thread of the attempt before: what that one
    copies is of another attempt. A context manager that ends all.
    """

    def __init__(self, memory: Path, index: int):
        self._memory, self._index = memory, index
        self._address = ""
        self._members: list[int] = []  # of the last attempt
        self._word: str | None = None
        self._telling = threading.Lock()  # of the word, and of the file `copied`
        self._listening = ExitStack()
        self._ended = threading.Event()  # replaced for each attempt
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.rest()
        self._listening.close()
        if self._thread is not None:
            self._thread.join(_TIMEOUT_SECONDS)

    def listen(self, host: str) -> str:
        """Listen where a name or address of this machine leads; return it as HOST:PORT."""
        if not self._address:
            listener = Listener(host, 0, lambda: self._word, self._answer)
            self._address = f"{host}:{self._listening.enter_context(listener).port}"
        return self._address

    def rest(self) -> None:
        """Serve and follow no one until the next attempt in which this supervisor takes part."""
        self._ended.set()
        with self._telling:
            self._word = None

    def begin(
        self, addresses: Mapping[int, str], word: str, *, forgets: bool = False
    ) -> threading.Event:
        """Begin to serve and follow the others of an attempt.

        Args:
          addresses: supervisor -> address of its memory, for all that take part, in order; empty if
            some have none.
          word: secret of these memories.
          forgets: whether the steps in this memory are of another history than the others'.

        Returns:
          An event that is set when the memory is ready for the trainer, with its lost steps.
        """
        self.rest()
        before, ready = self._thread, threading.Event()
        self._ended = ended = threading.Event()

        def serve() -> None:
            if before is not None:
                before.join()
            try:
                self._forget([*addresses], forgets=forgets)
                if len(addresses) < 2:
                    return  # alone, or among others without memory
                with self._telling:
                    if ended.is_set():
                        return
                    self._word = word
                members = [*addresses]
                position = members.index(self._index)
                after = members[(position + 1) % len(members)]
                self._fetch(Source(addresses[after], word, PARTNER, ended))
            except OSError:  # without room, or a directory, nothing is copied or waited for
                return
            finally:
                ready.set()
            previous = Source(addresses[members[position - 1]], word, OWN, ended)
            while not ended.wait(_LOOK_SECONDS):
                # The source may have ended, and another one may have its place.
                with suppress(*ERRORS):
                    copy_new_steps(previous, self._memory / PARTNER)

        self._thread = threading.Thread(target=serve, name="partner", daemon=True)
        self._thread.start()
        return ready

    def _forget(self, members: list[int], *, forgets: bool) -> None:
        """Remove steps from another history, and copies from supervisors other than these."""
        is_changed = forgets or (bool(self._members) and members != self._members)
        self._members = members
        if forgets:
            _remove(self._memory / OWN, names_in(self._memory / OWN))
        if is_changed:
            _remove(self._memory / PARTNER, names_in(self._memory / PARTNER))
        copied = self._memory / COPIED
        if is_changed or not copied.exists():  # or the memory is new, or was made again
            write_atomically(copied, [b"[]"])

    def _fetch(self, partner: Source) -> None:
        """Fetch this supervisor's steps back from its partner if none are here.

        What comes in time appears together: who follows this supervisor must not see only some.
        """
        own, fetched = self._memory / OWN, self._memory / "fetched"
        shutil.rmtree(fetched, ignore_errors=True)  # of another history, perhaps
        if names_in(own):
            return
        until = time.monotonic() + _REACH_SECONDS
        while time.monotonic() < until and not partner.ended.is_set():
            try:
                copy_new_steps(partner, fetched)
                break
            except ERRORS:  # it does not have its order yet
                partner.ended.wait(_LOOK_SECONDS)
        if names_in(fetched) and not partner.ended.is_set():
            shutil.rmtree(own, ignore_errors=True)
            fetched.rename(own)
        shutil.rmtree(fetched, ignore_errors=True)  # the next attempt fetches all

    def _answer(self, connection: socket.socket, word: str) -> None:
        # The client has perhaps ended; if it still reads, it sees the answer end.
        with connection, suppress(*ERRORS):
            connection.settimeout(_TIMEOUT_SECONDS)
            with connection.makefile("rwb") as file:
                request = parse_record(file.readline(_MAX_LINE), Request)
                if request.part in (OWN, PARTNER):
                    self._send(request, word, file)

    def _send(self, request: Request, word: str, out: BufferedIOBase) -> None:
        part = self._memory / request.part
        names = names_in(part)
        lacking = _oldest_first(names.difference(request.held))
        steps: Steps = {name: {} for name in names}
        for name in lacking:
            files = [path for path in (part / name).rglob("*") if path.is_file()]
            sizes = {path.relative_to(part / name): path.stat().st_size for path in files}
            steps[name] = {path.as_posix(): size for path, size in sizes.items()}
        out.write(json.dumps(steps).encode() + b"\n")
        with self._telling:
            if request.part == OWN and word == self._word:  # still
                write_atomically(self._memory / COPIED, [json.dumps(request.held).encode()])
        for name in lacking:
            for path, size in steps[name].items():
                with (part / name / path).open("rb") as file:
                    _copy(file, out, size, self._ended)


def _oldest_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (int(name.rpartition("/")[2]), name))


def _receive(
    answer: BufferedIOBase, files: Mapping[str, int], step: Path, ended: threading.Event
) -> None:
    """Write the files of a step that follow in an answer."""
    for name, size in files.items():
        if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
            raise Damaged(f"{name} is outside of the step")
        path = step / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as copy:
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
