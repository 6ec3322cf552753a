"""Copy replicas between the memories of supervisors, so that the loss of a host loses none.

The directory in memory of each supervisor has two parts. `own` is its trainer's: the steps that
`maxpipe.checkpoint.replicas` writes. `partner` is a copy of the `own` of the previous supervisor
among those that take part; the first one copies the last one's. A supervisor serves both parts to
the others, and asks the previous one for new steps several times a second; `copied` tells its
trainer which of its steps the partner has. A supervisor that begins with an empty memory, such as
on a host that replaces a lost one, first fetches its own steps back from its partner.

The council's order to start holds the addresses of the memories and a secret for them. Who asks
names the steps it has; the answer has the names of all, and the files of the others, the oldest
step first. Names and sizes are lines of JSON. Imports no JAX.
"""

import contextlib
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BufferedIOBase
from pathlib import Path, PurePosixPath
from typing import Self

from maxpipe.checkpoint.steps import COPIED, OWN, PARTNER, remove_step
from maxpipe.storage.local_files import write_atomically
from maxpipe.storage.records import Damaged, parse_record
from maxpipe.supervise.proof import CALLER, Listener, prove

_LOOK_SECONDS = 0.25
_REACH_SECONDS = 10.0  # to reach a partner that does not have its order yet
_TIMEOUT_SECONDS = 10.0
_MAX_LINE = 10_000_000  # bytes; names and sizes of the files of a step
_PIECE = 1 << 20  # bytes
_NAME = re.compile(r"[0-9a-f]+/\d+")  # name of a step: its run and its number

ERRORS = (OSError, Damaged)  # of a supervisor that cannot be reached, ends, or answers strangely


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

    @contextlib.contextmanager
    def ask(self, held: Iterable[str]) -> Iterator[BufferedIOBase]:
        """Yield the answer to a request for the steps other than `held`."""
        host, _, port = self.address.rpartition(":")
        request = json.dumps(asdict(Request(self.part, sorted(held))))
        with socket.create_connection((host, int(port)), timeout=_TIMEOUT_SECONDS) as connection:
            prove(connection, self.word, CALLER)
            connection.settimeout(_TIMEOUT_SECONDS)
            connection.sendall(request.encode() + b"\n")
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
    with source.ask(held) as answer:
        names = parse_record(answer.readline(_MAX_LINE), list[str])
        wanted = set(filter(_NAME.fullmatch, names))
        for name in _oldest_first(wanted - held):
            # Make room first, as long as a step remains that the source has.
            if names_in(target) & wanted:
                _remove(target, names_in(target) - wanted)
            scratch = target / f"{name}.unfinished"
            shutil.rmtree(scratch, ignore_errors=True)
            try:
                _receive(answer, scratch, source.ended)
                scratch.rename(target / name)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    if wanted:
        _remove(target, names_in(target) - wanted)


class Partners:
    """Serves a supervisor's memory to the others, and copies the previous supervisor's.

    Each attempt has a thread, which first waits for the thread of the attempt before: what that one
    copies is of another attempt.
    """

    def __init__(self, memory: Path, index: int):
        self._memory, self._index = memory, index
        self._members: list[int] = []  # of the last attempt
        self._word: str | None = None
        self._telling = threading.Lock()  # of the word, and of the file `copied`
        self._is_filling = False  # `own` is getting steps back: others must not see only some
        self._host, self._port = "", 0
        self._listening = contextlib.ExitStack()
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
        if host != self._host:
            self._listening.close()
            listener = Listener(host, 0, lambda: self._word, self._answer)
            self._host, self._port = host, self._listening.enter_context(listener).port
        return f"{host}:{self._port}"

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
        ended, ready = threading.Event(), threading.Event()
        self._ended = ended
        arguments = (self._thread, addresses, word, forgets, ended, ready)
        self._thread = threading.Thread(
            target=self._serve, args=arguments, name="partner", daemon=True
        )
        self._thread.start()
        return ready

    def _serve(
        self,
        before: threading.Thread | None,
        addresses: Mapping[int, str],
        word: str,
        forgets: bool,
        ended: threading.Event,
        ready: threading.Event,
    ) -> None:
        if before is not None:
            before.join()
        members = [*addresses]
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
            self._fetch(Source(addresses[after], word, PARTNER, ended))
        except OSError:  # without room, or a directory, nothing is copied or waited for
            return
        finally:
            ready.set()
        previous = Source(addresses[members[position - 1]], word, OWN, ended)
        while not ended.wait(_LOOK_SECONDS):
            # The source may have ended, and another one may have its place.
            with contextlib.suppress(*ERRORS):
                copy_new_steps(previous, self._memory / PARTNER)

    def _forget(self, members: list[int], *, forgets: bool) -> None:
        """Remove steps from another history, and copies from supervisors other than these."""
        copied = self._memory / COPIED
        is_changed = forgets or (bool(self._members) and members != self._members)
        self._members = members
        if forgets:
            _remove(self._memory / OWN, names_in(self._memory / OWN))
        if is_changed:
            _remove(self._memory / PARTNER, names_in(self._memory / PARTNER))
        if is_changed or not copied.exists():  # or the memory is new, or was made again
            write_atomically(copied, [b"[]"])

    def _fetch(self, partner: Source) -> None:
        """Fetch this supervisor's steps back from its partner if none are here."""
        own, until = self._memory / OWN, time.monotonic() + _REACH_SECONDS
        if names_in(own):
            return
        self._is_filling = True
        try:
            while time.monotonic() < until and not partner.ended.is_set():
                try:
                    return copy_new_steps(partner, own)
                except ERRORS:  # it does not have its order yet
                    partner.ended.wait(_LOOK_SECONDS)
        finally:
            self._is_filling = False

    def _answer(self, connection: socket.socket, word: str) -> None:
        # The client has perhaps ended; if it still reads, it sees the answer end.
        with connection, contextlib.suppress(*ERRORS):
            connection.settimeout(_TIMEOUT_SECONDS)
            with connection.makefile("rwb") as file:
                request = parse_record(file.readline(_MAX_LINE), Request)
                if request.part in (OWN, PARTNER):
                    self._send(request, word, file)

    def _send(self, request: Request, word: str, out: BufferedIOBase) -> None:
        part = self._memory / request.part
        is_unknown = request.part == OWN and self._is_filling
        names = set() if is_unknown else names_in(part)
        out.write(json.dumps(sorted(names)).encode() + b"\n")
        with self._telling:
            if request.part == OWN and word == self._word:  # still
                write_atomically(self._memory / COPIED, [json.dumps(request.held).encode()])
        for name in _oldest_first(names.difference(request.held)):
            step = part / name
            files = {path: path.stat().st_size for path in step.rglob("*") if path.is_file()}
            sizes = {path.relative_to(step).as_posix(): size for path, size in files.items()}
            out.write(json.dumps(sizes).encode() + b"\n")
            for path, size in files.items():
                with path.open("rb") as file:
                    _copy(file, out, size, self._ended)


def _oldest_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (int(name.rpartition("/")[2]), name))


def _receive(answer: BufferedIOBase, step: Path, ended: threading.Event) -> None:
    """Write the files of a step that follow in an answer."""
    for name, size in parse_record(answer.readline(_MAX_LINE), dict[str, int]).items():
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
