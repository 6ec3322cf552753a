"""Carry reports and orders between the supervisors of a run, over TCP, as lines of text.

Supervisor 0 listens at the address that is announced as the run's coordinator, to those who prove
the run's secret; the coordinators of attempts, which the trainers start, listen at other ports.
Both sides send a line every few seconds, so that a lost host is noticed. Imports no JAX.
"""

import queue
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Self

from maxpipe.config.terminal import emit
from maxpipe.storage.records import Damaged
from maxpipe.supervise.council import Council
from maxpipe.supervise.ending import FAILED
from maxpipe.supervise.messages import Finish, Joined, Message, Order, Report, decode, encode
from maxpipe.supervise.secret import Listener

PING_SECONDS = 5.0
SILENCE_SECONDS = 30.0

_TICK_SECONDS = 0.1
_FAREWELL_SECONDS = 5.0
_SURE_SECONDS = 1.0  # a line heard this long after another one came: there are two
_MAX_LINE = 200_000  # bytes


class LinkLost(ConnectionError):
    """The other side is gone, has been silent for too long, or is of another version."""


class Line:
    """Sends and receives messages over a connection whose other side has proved the secret.

    A thread puts each message into `inbox`, with the line, and at last why there are no more.
    """

    def __init__(self, connection: socket.socket, inbox: "Inbox"):
        self.member = -1  # the supervisor at its other side, once it has greeted
        self.is_answered = False  # the other side has been heard since the proof
        self.came = self.heard = self._pinged = time.monotonic()
        self._socket, self._inbox = connection, inbox
        self._socket.settimeout(SILENCE_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._receive, name="line", daemon=True).start()

    def send(self, message: Message | None) -> None:
        """Send a message, or only a sign of life; raises `LinkLost` if the other side is gone."""
        text = encode(message) if message is not None else ""
        try:
            self._socket.sendall(text.encode() + b"\n")
        except OSError as error:
            raise LinkLost(str(error)) from error

    def ping(self) -> None:
        """Send a sign of life if it is time for one; raises as `send`."""
        now = time.monotonic()
        if now - self._pinged > PING_SECONDS:
            self._pinged = now
            self.send(None)

    def close(self) -> None:
        """Close the connection, which also ends the thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self) -> None:
        why = "closed"
        try:
            with self._socket.makefile("rb") as lines:
                while (line := lines.readline(_MAX_LINE)).endswith(b"\n"):
                    self.heard, self.is_answered = time.monotonic(), True
                    if text := line.decode(errors="replace").strip():
                        self._inbox.put((self, decode(text)))
        except TimeoutError:
            why = f"silent for {SILENCE_SECONDS:g} s"
        except OSError as error:
            why = str(error)
        except Damaged as error:
            why = f"of another version: {error}"
        self._inbox.put((self, LinkLost(why)))


Inbox = queue.SimpleQueue[tuple[Line, Message | LinkLost]]


class Hub:
    """Connects a council with all supervisors of a run, in a thread of supervisor 0.

    The others reach `host`, a name or address of this machine, and `port`, 0 for any; this machine
    itself reaches the hub at `address`.
    """

    def __init__(self, council: Council, host: str, port: int, secret: str):
        self._council = council
        self._inbox: Inbox = queue.SimpleQueue()
        self._listener = Listener(
            host, port, lambda: secret, lambda connection, _: Line(connection, self._inbox)
        )
        self.address = self._listener.own_host, self._listener.port
        self._seats: dict[int, Line] = {}  # member -> its line
        self._waiting: dict[Line, list[Report]] = {}  # reports of those without a seat
        self._dismissed: set[Line] = set()  # that have been told to leave
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="council", daemon=True)

    def __enter__(self) -> Self:
        self._listener.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        self._listener.__exit__()
        for line in [*self._seats.values(), *self._waiting, *self._dismissed]:
            line.close()

    def _serve(self) -> None:
        until = float("inf")
        # At the end the others must get the last order: they close their lines once they have it.
        while time.monotonic() < until and not (self._closed.is_set() and not self._seats):
            try:
                with suppress(queue.Empty):
                    self._hear(*self._inbox.get(timeout=_TICK_SECONDS))
                self._give_seats()
                orders = self._council.take_orders()
            except Exception as error:
                orders = self._fail(error)
            for line in [*self._seats.values(), *self._waiting]:
                with suppress(LinkLost):  # which the line's thread notices
                    line.ping()
            for line in self._seats.values():
                for order in orders:
                    with suppress(LinkLost):
                        line.send(order)
            if self._closed.is_set():
                until = min(until, time.monotonic() + _FAREWELL_SECONDS)

    def _hear(self, line: Line, message: Message | LinkLost) -> None:
        """Process what a supervisor has said, which greets first, or the end of its line."""
        has_seat = self._seats.get(line.member) is line
        if isinstance(message, LinkLost):
            line.close()
            self._waiting.pop(line, None)
            self._dismissed.discard(line)
            if has_seat:
                del self._seats[line.member]
                self._council.lose(line.member)
        elif not isinstance(message, Report):
            line.close()
        elif has_seat:
            self._take(line, message)
        elif line in self._waiting:
            self._waiting[line].append(message)
        elif isinstance(message, Joined) and line not in self._dismissed:
            line.member = message.index
            self._waiting[line] = [message]
        elif line not in self._dismissed:
            line.close()

    def _give_seats(self) -> None:
        """Let a supervisor join once it is clear whether another line of its number is alive.

        The other one may be an earlier one whose host has failed: it is silent then, and soon found
        lost. If it is alive, two claim this number, and the council decides.
        """
        for line in [*self._waiting]:
            other = self._seats.setdefault(line.member, line)
            if other is line or other.heard - line.came > _SURE_SECONDS:
                for report in self._waiting.pop(line):
                    self._take(line, report)

    def _take(self, line: Line, report: Report) -> None:
        """Pass a report to the council; its answer is that the supervisor has to leave."""
        if line in self._dismissed:
            return
        if refusal := self._council.receive(line.member, report):
            self._dismissed.add(line)
            if self._seats[line.member] is line:
                del self._seats[line.member]
            with suppress(LinkLost):
                line.send(refusal)

    def _fail(self, error: Exception) -> list[Order]:
        # Without this, supervisor 0 would go on as if the run were still supervised.
        emit("".join(traceback.format_exception(error)), sys.stderr)
        why = f"the council has failed: {type(error).__name__}: {error}"
        self._council.fail(why)
        return [Finish(FAILED, why)]
