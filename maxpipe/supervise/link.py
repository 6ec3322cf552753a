"""Carry reports and orders between the supervisors of a run, over TCP, as lines of text.

Supervisor 0 listens at the address that is announced as the run's coordinator, to those who prove
the run's secret; the coordinators of attempts, which the trainers start, listen at other ports.
Both sides send a line every few seconds, so that a lost host is noticed. Imports no JAX.
"""

import json
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import get_args

from maxpipe.config.terminal import emit
from maxpipe.storage.records import Damaged, parse_record
from maxpipe.supervise.council import Council, Joined, Order, Report
from maxpipe.supervise.ending import FAILED
from maxpipe.supervise.process import running
from maxpipe.supervise.secret import listening

PING_SECONDS = 5.0
SILENCE_SECONDS = 30.0

_TICK_SECONDS = 0.1
_FAREWELL_SECONDS = 5.0
_SURE_SECONDS = 1.0  # a line heard this long after another one has claimed its seat: there are two
_MAX_LINE = 200_000  # bytes

_KINDS: dict[str, type[Report | Order]] = {kind.__name__: kind for kind in get_args(Report | Order)}


def encode(message: Report | Order) -> str:
    return f"{type(message).__name__} {json.dumps(message._asdict(), default=asdict)}"


def decode(line: str) -> Report | Order:
    """Return the message in a line; raises `Damaged` if there is none."""
    kind, _, record = line.partition(" ")
    if kind not in _KINDS:
        raise Damaged(f"no message: {line[:100]!r}")
    return parse_record(record, _KINDS[kind])


class Line:
    """A connection whose other side has proved the secret.

    A thread puts each message into `inbox`, with the line, and at last why there are no more.
    """

    def __init__(self, connection: socket.socket, inbox: "Inbox"):
        self.member = -1  # the supervisor at its other side, once it has greeted
        self.heard = self._pinged = time.monotonic()
        self.claimed = 0.0  # when another line first claimed its seat
        self._socket, self._inbox = connection, inbox
        self._socket.settimeout(SILENCE_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._receive, name="line", daemon=True).start()

    def send(self, message: Report | Order) -> None:
        """Send a message; raises OSError if the other side is gone."""
        self._socket.sendall(encode(message).encode() + b"\n")

    def ping(self) -> None:
        """Send a sign of life if it is time for one; raises as `send`."""
        now = time.monotonic()
        if now - self._pinged > PING_SECONDS:
            self._pinged = now
            self._socket.sendall(b"\n")

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self) -> None:
        why = OSError("closed")
        try:
            with self._socket.makefile("rb") as lines:
                while (line := lines.readline(_MAX_LINE)).endswith(b"\n"):
                    self.heard = time.monotonic()
                    if text := line.decode(errors="replace").strip():
                        self._inbox.put((self, decode(text)))
        except (OSError, Damaged) as error:  # silent for too long, or of another version
            why = OSError(str(error))
        self._inbox.put((self, why))


Inbox = queue.SimpleQueue[tuple[Line, Report | Order | OSError]]


class Hub:
    """Connects a council with all supervisors of a run, in a thread of supervisor 0."""

    def __init__(self, council: Council):
        self._council = council
        self._inbox: Inbox = queue.SimpleQueue()
        self._seats: dict[int, Line] = {}  # member -> its line

    @contextmanager
    def serving(self, host: str, port: int, secret: str) -> Iterator[int]:
        """Listen at an address of this machine, or any port for 0; yield the port."""
        with (
            listening(host, port, lambda: secret, lambda c, _: Line(c, self._inbox)) as port,
            running(self._serve, "council"),
        ):
            yield port

    def _serve(self, closed: threading.Event) -> None:
        until = float("inf")
        # At the end the others must get the last order: they close their lines once they have it.
        while time.monotonic() < until and not (closed.is_set() and not self._seats):
            try:
                with suppress(queue.Empty):
                    self._hear(*self._inbox.get(timeout=_TICK_SECONDS))
                orders = self._council.take_orders()
            except Exception as error:  # or supervisor 0 would go on as if all were well
                emit("".join(traceback.format_exception(error)), sys.stderr)
                self._council.finish(FAILED, f"the council has failed: {error!r}")
                orders = self._council.take_orders()
            for line in self._seats.values():
                with suppress(OSError):  # which the line's thread notices
                    line.ping()
                    for order in orders:
                        line.send(order)
            if closed.is_set():
                until = min(until, time.monotonic() + _FAREWELL_SECONDS)

    def _hear(self, line: Line, message: Report | Order | OSError) -> None:
        """Process what a supervisor has said, which greets first, or the end of its line."""
        if isinstance(message, Joined) and line.member < 0:
            line.member = message.member
            other = self._seats.setdefault(line.member, line)
            if other is not line:
                other.claimed = other.claimed or time.monotonic()
                if other.heard - other.claimed <= _SURE_SECONDS:
                    # Its host may have failed. This one comes again until that line is found lost.
                    line.close()
                    return
        has_seat = self._seats.get(line.member) is line
        if isinstance(message, OSError):
            line.close()
            if has_seat:
                del self._seats[line.member]
                self._council.lose(line.member)
        elif isinstance(message, Joined) or (has_seat and isinstance(message, Report)):
            refusal = self._council.receive(line.member, message)
            if refusal is not None:
                if has_seat:
                    del self._seats[line.member]
                with suppress(OSError):
                    line.send(refusal)
