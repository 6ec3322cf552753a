"""Carry reports and orders between the supervisors of a run, over TCP, as lines of text.

Supervisor 0 listens at the address that is announced as the run's coordinator, to those who prove
the run's secret; the coordinators of attempts, which the trainers start, listen at other ports.
Both sides send a line every few seconds, so that a lost host is noticed. Imports no JAX.
"""

import queue
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from maxpipe.config.terminal import Note, emit
from maxpipe.supervision.council import Council
from maxpipe.supervision.messages import Joined, Message, Order, Report, decode, encode
from maxpipe.supervision.proof import CALLER, Listener, Unproved, prove

PING_SECONDS = 5.0
SILENCE_SECONDS = 30.0

_TICK_SECONDS = 0.1
_RETRY_SECONDS = 0.5
_FAREWELL_SECONDS = 5.0
_SURE_SECONDS = 1.0  # a line heard this long after another one came: there are two
_MAX_LINE = 200_000  # bytes
_OTHERS = "another program answers, or a supervisor with another output_dir or MAXPIPE_SECRET"


class LinkLost(ConnectionError):
    """The other side is gone, or has been silent for too long."""


class Line:
    """Sends and receives messages over a connected socket whose other side has proved the secret.

    Attributes:
      heard: when the other side was last heard, by `time.monotonic`; at first, when it connected.
      is_answered: whether `exchange` has heard the other side since the proof.
    """

    def __init__(self, connection: socket.socket):
        self.is_answered = False
        self.heard = self._pinged = time.monotonic()
        self._socket = connection
        self._socket.settimeout(SILENCE_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, text: str) -> None:
        """Send a line; raises `LinkLost` if the other side is gone."""
        try:
            self._socket.sendall(text.encode() + b"\n")
        except OSError as error:
            raise LinkLost(str(error)) from error

    def ping(self) -> None:
        """Send an empty line if it is time for one; raise `LinkLost` after a long silence."""
        now = time.monotonic()
        if now - self.heard > SILENCE_SECONDS:
            raise LinkLost(f"silent for {SILENCE_SECONDS:g} s")
        if now - self._pinged > PING_SECONDS:
            self._pinged = now
            self.send("")

    def receive(self) -> list[str]:
        """Return the lines that have arrived; to be called when a selector reports something.

        Lines that only tell that the other side is there are empty.

        Raises:
          LinkLost: the connection is closed, or what arrives is not lines.
        """
        try:
            received = self._socket.recv(65536)
        except OSError as error:
            raise LinkLost(str(error)) from error
        if not received:
            raise LinkLost("closed")
        self.heard = time.monotonic()
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        if len(self._buffer) > _MAX_LINE:
            raise LinkLost("no lines")
        return [line.decode(errors="replace") for line in lines]

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


@dataclass(eq=False)
class _Guest:
    """A supervisor's connection to the hub: a member's once seated.

    Attributes:
      line: the connection.
      came: when it was opened, by `time.monotonic`.
      member: number that the supervisor claims; -1 until it has greeted.
      unread: received lines that have not been processed.
      is_refused: whether it has been ordered to leave.
    """

    line: Line
    came: float = field(default_factory=time.monotonic)
    member: int = -1
    unread: list[str] = field(default_factory=list)
    is_refused: bool = False


class Hub:
    """Connects a council with all supervisors of a run, in a thread of supervisor 0.

    Args:
      council: the council, which receives reports and gives orders.
      host: name or address of this machine by which the others reach it.
      port: port to listen at; 0 for any.
      secret: the run's.

    Attributes:
      address: host and port by which this machine reaches it.
    """

    def __init__(self, council: Council, host: str, port: int, secret: str):
        self._council = council
        self._proved: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._listener = Listener(host, port, lambda: secret, lambda at, _: self._proved.put(at))
        self.address = self._listener.own_host, self._listener.port
        self._selector = selectors.DefaultSelector()
        self._guests: list[_Guest] = []
        self._seats: dict[int, _Guest] = {}
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
        for guest in self._guests:
            guest.line.close()
        self._selector.close()

    def _serve(self) -> None:
        try:
            self._serve_until_closed()
        except Exception as error:
            # Without this, supervisor 0 would go on as if the run were still supervised.
            emit(traceback.format_exc(), sys.stderr)
            self._council.fail(f"the council has failed: {type(error).__name__}: {error}")
            self._broadcast(self._council.take_orders())

    def _serve_until_closed(self) -> None:
        until = float("inf")
        # At the end the others must get the last order: they close their lines once they have it.
        while time.monotonic() < until and not (self._closed.is_set() and not self._guests):
            ready = {key.data for key, _ in self._selector.select(_TICK_SECONDS)}
            while not self._proved.empty():
                guest = _Guest(Line(self._proved.get()))
                self._selector.register(guest.line, selectors.EVENT_READ, guest)
                self._guests.append(guest)
            for guest in [*self._guests]:
                self._attend(guest, is_ready=guest in ready)
            self._broadcast(self._council.take_orders())
            if self._closed.is_set():
                until = min(until, time.monotonic() + _FAREWELL_SECONDS)

    def _attend(self, guest: _Guest, *, is_ready: bool) -> None:
        try:
            if is_ready:
                guest.unread += filter(None, guest.line.receive())
            if guest.is_refused:
                guest.unread.clear()  # it has not yet read the order to leave
            while guest.unread and self._is_heard(guest):
                self._take(guest, guest.unread.pop(0))
            guest.line.ping()
        except (LinkLost, ValueError):
            self._drop(guest)

    def _is_heard(self, guest: _Guest) -> bool:
        """Return whether the council should hear a guest, which greets first, yet.

        Another line of this member may be an earlier one whose host has failed: it is silent then,
        and soon found lost. If it is alive, two claim this number, and the council decides.
        """
        if guest.member < 0:
            greeting = decode(guest.unread[0])
            if not isinstance(greeting, Joined):
                raise ValueError(f"no greeting: {greeting}")
            guest.member = greeting.index
        holder = self._seats.setdefault(guest.member, guest)
        return holder is guest or holder.line.heard - guest.came > _SURE_SECONDS

    def _take(self, guest: _Guest, text: str) -> None:
        """Process a report; raises ValueError for other lines."""
        report = decode(text)
        if not isinstance(report, Report):
            raise ValueError(f"no report: {text!r}")
        if refusal := self._council.receive(guest.member, report):
            guest.is_refused = True
            guest.unread.clear()
            self._leave_seat(guest)
            guest.line.send(encode(refusal))

    def _leave_seat(self, guest: _Guest) -> bool:
        """Free a guest's seat; return whether it had one."""
        if self._seats.get(guest.member) is not guest:
            return False
        del self._seats[guest.member]
        return True

    def _drop(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        self._selector.unregister(guest.line)
        guest.line.close()
        if self._leave_seat(guest):
            self._council.lose(guest.member)

    def _broadcast(self, orders: Sequence[Order]) -> None:
        for order in orders:
            for guest in [*self._seats.values()]:
                try:
                    guest.line.send(encode(order))
                except LinkLost:
                    self._drop(guest)


def connect(
    address: tuple[str, int],
    secret: str,
    greet: Callable[[str], Joined],
    until: float,
    gives_up: Callable[[], bool],
    log: Note,
) -> Line | None:
    """Join the run's other supervisors as soon as supervisor 0 can be reached.

    Args:
      address: host and port of supervisor 0.
      secret: the run's.
      greet: function that returns the first report, given this host's address on the connection.
      until: when to stop waiting for supervisor 0, by `time.monotonic`.
      gives_up: function that returns whether to return None rather than keep waiting.
      log: function that receives a line, once, if somebody else answers.

    Raises:
      LinkLost: supervisor 0 could not be reached in time.
    """
    is_told = False
    while not gives_up():
        left = max(1.0, until - time.monotonic())
        try:
            connection = socket.create_connection(address, min(left, SILENCE_SECONDS))
            try:
                prove(connection, secret, CALLER)
                line = Line(connection)
                line.send(encode(greet(str(connection.getsockname()[0]))))
                return line
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            reason = _OTHERS if isinstance(error, Unproved) else str(error)
            message = describe_absence(address, reason)
            if time.monotonic() > until:
                raise LinkLost(message) from error
            if reason == _OTHERS and not is_told:
                is_told = True
                log(message)
            time.sleep(_RETRY_SECONDS)
    return None


def exchange(line: Line, handle: Callable[[Message], None], seconds: float) -> None:
    """Wait up to `seconds` for orders, and pass them to `handle`.

    Raises:
      LinkLost: supervisor 0 is gone, or of another version.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(line, selectors.EVENT_READ)
        texts = line.receive() if selector.select(seconds) else []
    try:
        orders = [decode(text) for text in texts if text]
    except ValueError as error:
        raise LinkLost(f"of another version: {error}") from error
    line.is_answered |= bool(texts)
    for order in orders:
        handle(order)
    line.ping()


def describe_absence(address: tuple[str, int], reason: str) -> str:
    """Return a message that supervisor 0 cannot be reached, why, and what to do."""
    where = f"{address[0]}:{address[1]}"
    return f"no supervisor 0 at {where} ({reason}); start it there, and let hosts reach this port"
