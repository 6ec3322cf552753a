"""Copy replicas between the memories of supervisors, so that the loss of a host loses none.

The directory in memory of each supervisor has two parts. `own` is its trainer's: the steps that
`maxpipe.checkpoint.replicas` writes. `partner` is a copy of the `own` of the previous supervisor
among those that take part; the first one copies the last one's. A supervisor serves both parts to
the others, and asks the previous one for new steps several times a second; `copied` tells its
trainer which of its steps the partner has. A supervisor that begins with an empty memory, such as
on a host that replaces a lost one, first fetches its own steps back from its partner.

The council's order to start holds the addresses of the memories and a secret for them. A request
and the head of its answer are lines of JSON; the bytes of a step's files follow. Imports no JAX.
"""

import contextlib
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path, PurePosixPath
from typing import Any, Self

from maxpipe.checkpoint.steps import COPIED, OWN, PARTNER, remove_step
from maxpipe.storage.local_files import write_atomically
from maxpipe.supervision.proof import CALLER, Listener, prove

_LOOK_SECONDS = 0.25
_REACH_SECONDS = 10.0  # to reach a partner that does not have its order yet
_TIMEOUT_SECONDS = 30.0
_MAX_LINE = 10_000_000  # bytes; names and sizes of the files of a step
_PIECE = 1 << 20  # bytes
_NAME = re.compile(r"[0-9a-f]+/\d+")  # name of a step: its run and its number

# Errors that an unreachable, ending or strange supervisor may cause; it may send any JSON.
ERRORS = (OSError, ValueError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Source:
    """One part of the memory of another supervisor.

    Attributes:
      address: HOST:PORT of its `MemoryServer`.
      word: secret of this memory.
      part: `OWN` or `PARTNER`.
      ended: event set when this supervisor or the attempt has ended; it ends every copy.
      lock: lock held while a step gets its name, so that none does after the end.
    """

    address: str
    word: str
    part: str
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def names(self, held: Iterable[str]) -> set[str]:
        """Report which steps have been copied already, and return those that the source has."""
        with self._ask({"held": sorted(held)}) as answer:
            return {name for name in _line(answer) if _NAME.fullmatch(name)}

    def fetch(self, name: str, target: Path) -> None:
        """Copy a step to a new directory; raises one of `ERRORS` if it has gone meanwhile."""
        with self._ask({"name": name}) as answer:
            for file, size in _line(answer).items():
                if ".." in PurePosixPath(file).parts or PurePosixPath(file).is_absolute():
                    raise ValueError(f"{file} is outside of the step")
                path = target / file
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as copy:
                    _copy(answer, copy, size, self.ended)

    def commit(self, scratch: Path, name: Path) -> None:
        """Give a step its name when it is whole; raises ValueError if the source has ended."""
        with self.lock:
            if self.ended.is_set():
                raise ValueError("the attempt has ended")
            scratch.rename(name)

    @contextlib.contextmanager
    def _ask(self, request: Mapping[str, object]) -> Iterator[BufferedIOBase]:
        host, _, port = self.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=_TIMEOUT_SECONDS) as connection:
            prove(connection, self.word, CALLER)
            connection.settimeout(_TIMEOUT_SECONDS)
            connection.sendall(json.dumps({"part": self.part, **request}).encode() + b"\n")
            with connection.makefile("rb") as answer:
                yield answer


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
    wanted = source.names(held)
    for name in sorted(wanted - held, key=lambda name: int(name.rpartition("/")[2])):
        # Make room first, as long as a step remains that the source has.
        _remove(target, names_in(target) - wanted if names_in(target) & wanted else set())
        scratch = target / f"{name}.unfinished"
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            source.fetch(name, scratch)
            source.commit(scratch, target / name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    _remove(target, names_in(target) - wanted if wanted else set())


class MemoryServer:
    """Serves both parts of a memory to the other supervisors of the run, in threads.

    Args:
      memory: the directory.

    Attributes:
      is_filling: whether `own` is getting steps back from a partner, which would remove those still
        missing here if it saw the others.
    """

    def __init__(self, memory: Path):
        self._memory = memory
        self._word: str | None = None
        self._telling = threading.Lock()
        self._closed = threading.Event()
        self.is_filling = False
        self._host = ""
        self._listening = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._listening.close()

    def listen(self, host: str) -> str:
        """Listen where a name or address of this machine leads; return it as HOST:PORT."""
        if host != self._host:
            self._listening.close()
            listener = Listener(host, 0, lambda: self._word, self._answer)
            self._host, self._port = host, self._listening.enter_context(listener).port
        return f"{host}:{self._port}"

    def open_to(self, word: str | None) -> None:
        """Serve only those who prove this word from now on; with None serve no one."""
        self._word = word

    def forget_copies(self) -> None:
        """Tell the trainer that no partner is known to have copied its steps."""
        with self._telling:
            write_atomically(self._memory / COPIED, [b"[]"])

    def _answer(self, connection: socket.socket, word: str) -> None:
        # The client has perhaps ended; if it still reads, it sees the answer end.
        with connection, contextlib.suppress(*ERRORS):
            connection.settimeout(_TIMEOUT_SECONDS)
            with connection.makefile("rwb") as file:
                self._serve(_line(file), word, file)

    def _serve(self, request: dict[str, object], word: str, out: BufferedIOBase) -> None:
        """Answer a request; raises ValueError for one that is refused."""
        part = str(request.get("part"))
        if part not in (OWN, PARTNER):
            raise ValueError(f"no part {part!r}")
        name = request.get("name")
        if name is None:
            is_unknown = part == OWN and self.is_filling
            names = set() if is_unknown else names_in(self._memory / part)
            out.write(json.dumps(sorted(names)).encode() + b"\n")
            if part == OWN:
                held = json.dumps(request.get("held")).encode()
                with self._telling:
                    if word == self._word:  # still
                        write_atomically(self._memory / COPIED, [held])
            return
        if not _NAME.fullmatch(str(name)):
            raise ValueError(f"no step {name!r}")
        step = self._memory / part / str(name)
        files = {path: path.stat().st_size for path in step.rglob("*") if path.is_file()}
        sizes = {path.relative_to(step).as_posix(): size for path, size in files.items()}
        out.write(json.dumps(sizes).encode() + b"\n")
        for path, size in files.items():
            with path.open("rb") as file:
                _copy(file, out, size, self._closed)


class Partners:
    """Serves a supervisor's memory, and copies the previous supervisor's, in threads.

    Args:
      memory: the directory.
      index: index of this supervisor.

    Attributes:
      listen: see `MemoryServer.listen`.
    """

    def __init__(self, memory: Path, index: int):
        self._memory, self._index = memory, index
        self._members: list[int] = []
        self._server = MemoryServer(memory)
        self.listen = self._server.listen
        self._source: Source | None = None
        self._closed = threading.Event()
        self._ended = threading.Event()  # replaced for each attempt
        self._committing = threading.Lock()
        self._fetching = threading.Lock()
        self._thread = threading.Thread(target=self._follow, name="partner", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._ended.set()
        self._server.__exit__()
        self._thread.join(_TIMEOUT_SECONDS)

    def rest(self) -> None:
        """Serve and follow no one until the next attempt in which this supervisor takes part."""
        self._ended.set()
        self._server.open_to(None)
        self._source = None

    def begin(
        self, addresses: Mapping[int, str], word: str, *, forgets: bool = False
    ) -> threading.Thread:
        """Begin to serve and follow the others of an attempt, in the thread that is returned.

        The thread also fetches lost steps; it ends when they are here.

        Args:
          addresses: supervisor -> address of its memory, for all that take part, in order; empty if
            some have none.
          word: secret of these memories.
          forgets: whether the steps in this memory are of another history than the others'.
        """
        self.rest()
        ended = self._ended = threading.Event()
        arguments = (addresses, word, forgets, ended)
        thread = threading.Thread(target=self._begin, args=arguments, name="begin", daemon=True)
        thread.start()
        return thread

    def _begin(
        self, addresses: Mapping[int, str], word: str, forgets: bool, ended: threading.Event
    ) -> None:
        partner = None
        with self._committing:  # no step of an earlier attempt is committed after this
            # Without room, or a directory, nothing is copied or waited for.
            if not ended.is_set():
                with contextlib.suppress(OSError):
                    self._forget([*addresses], forgets=forgets)
                    partner = self._open(addresses, word, ended)
        if partner is not None:
            self._fetch(partner)

    def _forget(self, members: list[int], *, forgets: bool) -> None:
        """Remove steps from another history, and copies from supervisors other than these."""
        if forgets:
            _remove(self._memory / OWN, names_in(self._memory / OWN))
        if forgets or (self._members and members != self._members):
            _remove(self._memory / PARTNER, names_in(self._memory / PARTNER))
            self._server.forget_copies()
        elif not (self._memory / COPIED).exists():  # the memory is new, or was made again
            self._server.forget_copies()
        self._members = members

    def _open(
        self, addresses: Mapping[int, str], word: str, ended: threading.Event
    ) -> Source | None:
        """Serve and follow the others; return the source to fetch steps back from, if any."""
        members = [*addresses]
        if len(members) < 2:
            return None  # alone, or among others without memory
        position = members.index(self._index)
        before, after = members[position - 1], members[(position + 1) % len(members)]
        guards = ended, self._committing
        self._source = Source(addresses[before], word, OWN, *guards)
        self._server.open_to(word)
        return Source(addresses[after], word, PARTNER, *guards)

    def _fetch(self, partner: Source) -> None:
        """Fetch this supervisor's steps back from its partner if none are here."""
        until = time.monotonic() + _REACH_SECONDS
        with self._fetching:  # a fetch that an ended attempt has left finishes first
            if names_in(self._memory / OWN):
                return
            self._server.is_filling = True
            try:
                while time.monotonic() < until and not partner.ended.is_set():
                    try:
                        copy_new_steps(partner, self._memory / OWN)
                        break
                    except ERRORS:  # it does not have its order yet
                        partner.ended.wait(_LOOK_SECONDS)
            finally:
                self._server.is_filling = False

    def _follow(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            source = self._source
            if source is not None:
                # The source may have ended, and another one may have its place.
                with contextlib.suppress(*ERRORS):
                    copy_new_steps(source, self._memory / PARTNER)


def _line(stream: BufferedIOBase) -> Any:
    """Return the value of a line of JSON; raises ValueError."""
    return json.loads(stream.readline(_MAX_LINE))


def _copy(
    source: BufferedIOBase, target: BufferedIOBase, size: int, ended: threading.Event
) -> None:
    """Copy `size` bytes; raises ValueError if there are fewer, or if this side has ended."""
    while size > 0:
        piece = source.read(min(size, _PIECE))
        if not piece or ended.is_set():
            raise ValueError("one side has ended")
        target.write(piece)
        size -= len(piece)


def _remove(part: Path, names: Iterable[str]) -> None:
    for name in names:
        remove_step(part / name)
