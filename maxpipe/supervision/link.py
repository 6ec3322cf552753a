"""Carry reports and orders between the supervisors of a run, over TCP, as lines of JSON.

Supervisor 0 listens at the address that is announced as the run's coordinator; the coordinators of
attempts, which the trainers start, listen at other ports. Both sides send a line every few seconds,
so that a lost host is noticed. Like JAX's coordination service this trusts its network: whoever
reaches the port can stop a run, though not choose what it executes. Imports no JAX.
"""

import contextlib
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from maxpipe.config.terminal import emit
from maxpipe.supervision.council import Council
from maxpipe.supervision.messages import Joined, Message, Order, Report, decode, encode

PING_SECONDS = 5.0
SILENCE_SECONDS = 30.0

_TICK_SECONDS = 0.1
_RETRY_SECONDS = 0.5
_FAREWELL_SECONDS = 5.0
_SURE_SECONDS = 1.0  # a line heard this long after another one came: there are two
_MAX_LINE = 200_000  # bytes; a stranger may send anything
_MAX_UNREAD = 100  # lines


class LinkLost(ConnectionError):
    """The other side is gone, or has been silent for too long."""


class Line:
    """Sends and receives messages over a connected socket; the first line names the member.

    Attributes:
      heard: when the other side was last heard, by `time.monotonic`; at first, when it connected.
      is_answered: whether `exchange` has heard a supervisor at the other side, not just anyone.
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
    """A connection to the hub: a supervisor's once it has sent its number, a member's once seated.

    Attributes:
      line: the connection.
      came: when it was opened, by `time.monotonic`.
      member: number that the supervisor claims; None until it has.
      unread: received lines that have not been processed.
      is_refused: whether it has been ordered to leave.
    """

    line: Line
    came: float = field(default_factory=time.monotonic)
    member: int | None = None
    unread: list[str] = field(default_factory=list)
    is_refused: bool = False


class Hub:
    """Connects a council with all supervisors of a run, in a thread of supervisor 0.

    Args:
      council: the council, which receives reports and gives orders.
      port: port to listen at; 0 for any, on localhost only.

    Attributes:
      port: the port in use.
    """

    def __init__(self, council: Council, port: int):
        self._council = council
        self._listener = _listen(port)
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._guests: list[_Guest] = []
        self._seats: dict[int, _Guest] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="council", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        for guest in self._guests:
            guest.line.close()
        self._selector.close()
        self._listener.close()

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
            if None in ready:
                self._accept()
            for guest in [*self._guests]:
                self._attend(guest, is_ready=guest in ready)
            self._broadcast(self._council.take_orders())
            if self._closed.is_set():
                until = min(until, time.monotonic() + _FAREWELL_SECONDS)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            guest = _Guest(Line(self._listener.accept()[0]))
            self._selector.register(guest.line, selectors.EVENT_READ, guest)
            self._guests.append(guest)

    def _attend(self, guest: _Guest, *, is_ready: bool) -> None:
        try:
            if is_ready:
                guest.unread += filter(None, guest.line.receive())
            if guest.is_refused:
                guest.unread.clear()  # it has not yet read the order to leave
            while guest.unread and (guest.member is None or self._is_heard(guest, guest.member)):
                self._take(guest, guest.unread.pop(0))
            if len(guest.unread) > _MAX_UNREAD:
                raise ValueError("a supervisor that waits for its seat says too much")
            guest.line.ping()
        except (LinkLost, ValueError):
            self._drop(guest)

    def _is_heard(self, guest: _Guest, member: int) -> bool:
        """Return whether the council should hear a guest as this member yet.

        Another line of this member may be an earlier one whose host has failed: it is silent then,
        and soon found lost. If it is alive, two claim this number, and the council decides.
        """
        holder = self._seats.setdefault(member, guest)
        return holder is guest or holder.line.heard - guest.came > _SURE_SECONDS

    def _take(self, guest: _Guest, text: str) -> None:
        """Process a line: first the member's number, then reports; raises ValueError for others."""
        if guest.member is None:
            guest.member = int(text)
            return
        report = decode(text)
        if not isinstance(report, Report):
            raise ValueError(f"no report: {text!r}")
        if self._seats[guest.member] is not guest and not isinstance(report, Joined):
            raise ValueError("it has not joined")
        if refusal := self._council.receive(guest.member, report):
            guest.is_refused = True
            guest.unread.clear()
            self._leave_seat(guest)
            guest.line.send(encode(refusal))

    def _leave_seat(self, guest: _Guest) -> bool:
        """Free a guest's seat; return whether it had one."""
        if guest.member is None or self._seats.get(guest.member) is not guest:
            return False
        del self._seats[guest.member]
        return True

    def _drop(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        self._selector.unregister(guest.line)
        guest.line.close()
        if self._leave_seat(guest) and guest.member is not None:
            self._council.lose(guest.member)

    def _broadcast(self, orders: Sequence[Order]) -> None:
        for order in orders:
            for guest in [*self._seats.values()]:
                try:
                    guest.line.send(encode(order))
                except LinkLost:
                    self._drop(guest)


def _listen(port: int) -> socket.socket:
    if not port:
        return socket.create_server(("localhost", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def connect(
    address: tuple[str, int],
    member: int,
    greet: Callable[[str], Joined],
    until: float,
    gives_up: Callable[[], bool],
) -> Line | None:
    """Join the run's other supervisors as soon as supervisor 0 can be reached.

    Args:
      address: host and port of supervisor 0.
      member: number of this supervisor.
      greet: function that returns the first report, given this host's address on the connection.
      until: when to stop waiting for supervisor 0, by `time.monotonic`.
      gives_up: function that returns whether to return None rather than keep waiting.

    Raises:
      LinkLost: supervisor 0 could not be reached in time.
    """
    while not gives_up():
        try:
            connection = socket.create_connection(address, timeout=SILENCE_SECONDS)
            line = Line(connection)
            line.send(str(member))
            line.send(encode(greet(str(connection.getsockname()[0]))))
            return line
        except OSError as error:
            if time.monotonic() > until:
                raise LinkLost(describe_absence(address, str(error))) from error
            time.sleep(_RETRY_SECONDS)
    return None


def exchange(line: Line, handle: Callable[[Message], None], seconds: float) -> None:
    """Wait up to `seconds` for orders, and pass them to `handle`.

    Raises:
      LinkLost: supervisor 0 is gone, or another program listens in its place.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(line, selectors.EVENT_READ)
        texts = line.receive() if selector.select(seconds) else []
    try:
        orders = [decode(text) for text in texts if text]
    except ValueError as error:
        raise LinkLost("another program answers there") from error
    line.is_answered |= bool(texts)
    for order in orders:
        handle(order)
    line.ping()


def describe_absence(address: tuple[str, int], reason: str) -> str:
    """Return a message that supervisor 0 cannot be reached, why, and what to do."""
    where = f"{address[0]}:{address[1]}"
    return f"no supervisor 0 at {where} ({reason}); start it there, and let hosts reach this port"
