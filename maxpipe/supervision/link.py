"""Carry reports and orders between the supervisors of a run, over TCP, as lines of JSON.

Supervisor 0 listens at the address at which the run's coordinator is announced; the coordinators of
attempts, which the trainers start, listen at other ports. Both sides send a line every few seconds,
so that a lost host is noticed. Like JAX's coordination service this trusts the network that it is
in: whoever reaches the port can stop a run, though not choose what it executes. Imports no JAX.
"""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

from maxpipe.supervision.council import (
    Council,
    Ended,
    Joined,
    Message,
    Order,
    Stopping,
    decode,
    encode,
)

PING_SECONDS = 5.0
SILENCE_SECONDS = 30.0

_TICK_SECONDS = 0.1
_RETRY_SECONDS = 0.5
_FAREWELL_SECONDS = 5.0
_MAX_LINE = 10_000  # bytes; what strangers send is not kept


class LinkLost(ConnectionError):
    """The other side is gone, or has been silent for too long."""


class Line:
    """Send and receive messages over a connected socket; the first line says which member it is."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._socket.settimeout(SILENCE_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""
        self._heard = self._pinged = time.monotonic()
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor, for `select`."""
        return self._socket.fileno()

    def send(self, text: str) -> None:
        """Send a line; raises `LinkLost` if the other side is gone."""
        try:
            with self._lock:
                self._socket.sendall(text.encode() + b"\n")
        except OSError as error:
            raise LinkLost(str(error)) from error

    def ping(self) -> None:
        """Send an empty line if it is time for one; raise `LinkLost` after a long silence."""
        now = time.monotonic()
        if now - self._heard > SILENCE_SECONDS:
            raise LinkLost(f"silent for {SILENCE_SECONDS:g} s")
        if now - self._pinged > PING_SECONDS:
            self._pinged = now
            self.send("")

    def receive(self) -> list[str]:
        """Return the lines that have come, without waiting; raise `LinkLost` at the end of them."""
        if not select.select([self._socket], [], [], 0)[0]:
            return []
        try:
            received = self._socket.recv(65536)
        except OSError as error:
            raise LinkLost(str(error)) from error
        if not received:
            raise LinkLost("closed")
        self._heard = time.monotonic()
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        if len(self._buffer) > _MAX_LINE:
            raise LinkLost("no lines")
        return [line.decode(errors="replace") for line in lines if line]

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class Hub:
    """Let a council hear all supervisors of a run, in a thread of supervisor 0.

    Args:
      council: decides.
      port: to listen at; 0 for any, at this machine's own address only.

    Attributes:
      port: the port in use.
    """

    def __init__(self, council: Council, port: int):
        self._council = council
        self._listener = socket.create_server(("" if port else "localhost", port))
        self.port = int(self._listener.getsockname()[1])
        self._lines: dict[Line, int | None] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="council", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        for line in self._lines:
            line.close()
        self._listener.close()

    def _serve(self) -> None:
        until = float("inf")
        # At the end the others must get the last order: they close their lines when they have.
        while time.monotonic() < until and not (self._closed.is_set() and not self._lines):
            waiting: list[socket.socket | Line] = [self._listener, *self._lines]
            if self._listener in select.select(waiting, [], [], _TICK_SECONDS)[0]:
                with contextlib.suppress(OSError):
                    self._lines[Line(self._listener.accept()[0])] = None
            for line in [*self._lines]:
                self._attend(line)
            for order in self._council.take_orders():
                self._broadcast(order)
            if self._closed.is_set():
                until = min(until, time.monotonic() + _FAREWELL_SECONDS)

    def _attend(self, line: Line) -> None:
        try:
            for text in line.receive():
                self._take(line, text)
            line.ping()
        except (LinkLost, ValueError):
            self._drop(line)

    def _take(self, line: Line, text: str) -> None:
        """Take a line, the first of which is the member's number; raises ValueError for others."""
        member = self._lines[line]
        if member is None:
            member = int(text)
            # Its earlier line, if it has not been found lost yet, will be by the next attempt.
            if member in self._lines.values():
                raise ValueError(f"supervisor {member} is there")
            self._lines[line] = member
            return
        report = decode(text)
        if not isinstance(report, Joined | Ended | Stopping):
            raise ValueError(f"no report: {text!r}")
        self._council.receive(member, report)

    def _drop(self, line: Line) -> None:
        member = self._lines.pop(line, None)
        line.close()
        if member is not None:
            self._council.lose(member)

    def _broadcast(self, order: Order) -> None:
        for line, member in [*self._lines.items()]:
            if member is not None:
                try:
                    line.send(encode(order))
                except LinkLost:
                    self._drop(line)


def connect(
    address: tuple[str, int],
    member: int,
    greet: Callable[[str], Joined],
    seconds: float,
    gives_up: Callable[[], bool],
) -> Line | None:
    """Join the run's other supervisors, as soon as supervisor 0 can be reached.

    Args:
      address: host and port of supervisor 0.
      member: number of this one.
      greet: returns its first report, given the address of this host on the way to supervisor 0.
      seconds: to wait for supervisor 0.
      gives_up: whether to return None rather than wait on.

    Raises:
      LinkLost: supervisor 0 could not be reached in time.
    """
    until = time.monotonic() + seconds
    while not gives_up():
        try:
            connection = socket.create_connection(address, timeout=SILENCE_SECONDS)
            line = Line(connection)
            line.send(str(member))
            line.send(encode(greet(str(connection.getsockname()[0]))))
            return line
        except OSError as error:
            if time.monotonic() > until:
                where = f"{address[0]}:{address[1]}"
                raise LinkLost(f"no supervisor 0 at {where} in {seconds:g} s: {error}") from error
            time.sleep(_RETRY_SECONDS)
    return None


def exchange(line: Line, handle: Callable[[Message], None], seconds: float) -> None:
    """Wait a moment for orders, and hand them over; raises `LinkLost`."""
    select.select([line], [], [], seconds)
    for text in line.receive():
        handle(decode(text))
    line.ping()


def free_port() -> int:
    """Return a port of this machine at which nothing listens."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])
