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
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Self

from maxpipe.config.terminal import Note, emit
from maxpipe.storage.records import Damaged
from maxpipe.supervise.council import Council
from maxpipe.supervise.messages import Finish, Joined, Message, Order, Report, decode, encode
from maxpipe.supervise.proof import CALLER, Listener, Unproved, prove

PING_SECONDS = 5.0
SILENCE_SECONDS = 30.0

_TICK_SECONDS = 0.1
_RETRY_SECONDS = 0.5
_FAREWELL_SECONDS = 5.0
_SURE_SECONDS = 1.0  # a line heard this long after another one came: there are two
_MAX_LINE = 200_000  # bytes
_OTHERS = "another program answers, or a supervisor with another output_dir or MAXPIPE_SECRET"


class LinkLost(ConnectionError):
    """The other side is gone, has been silent for too long, or is of another version."""


class Line:
    """Sends and receives messages over a connection whose other side has proved the secret."""

    def __init__(self, connection: socket.socket):
        self.is_answered = False  # the other side has been heard since the proof
        self.heard = self._pinged = time.monotonic()  # when; at first, when it connected
        self._socket = connection
        self._socket.settimeout(SILENCE_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = threading.Lock()
        self._received: queue.SimpleQueue[Message | LinkLost] = queue.SimpleQueue()

    def send(self, message: Message | None) -> None:
        """Send a message, or only a sign of life; raises `LinkLost` if the other side is gone."""
        text = encode(message) if message is not None else ""
        try:
            with self._sending:
                self._socket.sendall(text.encode() + b"\n")
        except OSError as error:
            raise LinkLost(str(error)) from error

    def ping(self) -> None:
        """Send a sign of life if it is time for one; raises as `send`."""
        now = time.monotonic()
        if now - self._pinged > PING_SECONDS:
            self._pinged = now
            self.send(None)

    def messages(self) -> Iterator[Message]:
        """Wait for messages, and yield each; raises `LinkLost` at the end."""
        try:
            with self._socket.makefile("rb") as lines:
                while (line := lines.readline(_MAX_LINE)).endswith(b"\n"):
                    self.heard, self.is_answered = time.monotonic(), True
                    if text := line.decode(errors="replace").strip():
                        yield decode(text)
        except TimeoutError as error:
            raise LinkLost(f"silent for {SILENCE_SECONDS:g} s") from error
        except OSError as error:
            raise LinkLost(str(error)) from error
        except Damaged as error:
            raise LinkLost(f"of another version: {error}") from error
        raise LinkLost("closed")

    def receive(self) -> None:
        """Let a thread wait for messages from now on; `exchange` takes them."""
        threading.Thread(target=self._receive, name="orders", daemon=True).start()

    def exchange(self, handle: Callable[[Message], None], seconds: float) -> None:
        """Wait up to `seconds` for messages, and pass them to `handle`; raises as `messages`."""
        with suppress(queue.Empty):
            received = self._received.get(timeout=seconds)
            while True:
                if isinstance(received, LinkLost):
                    raise received
                handle(received)
                received = self._received.get_nowait()
        self.ping()

    def _receive(self) -> None:
        try:
            for message in self.messages():
                self._received.put(message)
        except LinkLost as error:
            self._received.put(error)

    def close(self) -> None:
        """Close the connection, which also ends `messages` in another thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Hub:
    """Connects a council with all supervisors of a run, in threads of supervisor 0.

    The others reach `host`, a name or address of this machine, and `port`, 0 for any; this machine
    itself reaches the hub at `address`.
    """

    def __init__(self, council: Council, host: str, port: int, secret: str):
        self._council = council
        self._listener = Listener(host, port, lambda: secret, self._attend)
        self.address = self._listener.own_host, self._listener.port
        self._lines: set[Line] = set()
        self._seats: dict[int, Line] = {}  # member -> its line
        self._lock = threading.RLock()  # of all these, and of the council
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
        for line in [*self._lines]:
            line.close()

    def _serve(self) -> None:
        until = float("inf")
        # At the end the others must get the last order: they close their lines once they have it.
        while time.monotonic() < until and not (self._closed.is_set() and not self._lines):
            with self._lock:
                self._give_orders()
            if self._closed.is_set():
                until = min(until, time.monotonic() + _FAREWELL_SECONDS)
            time.sleep(_TICK_SECONDS)

    def _give_orders(self) -> None:
        try:
            orders = self._council.take_orders()
        except Exception as error:
            orders = self._fail(error)
        for order in orders:
            for line in self._seats.values():
                with suppress(LinkLost):  # which `_attend` notices
                    line.send(order)
        for line in self._lines:
            with suppress(LinkLost):
                line.ping()

    def _fail(self, error: Exception) -> list[Order]:
        # Without this, supervisor 0 would go on as if the run were still supervised.
        emit("".join(traceback.format_exception(error)), sys.stderr)
        finish = Finish(1, f"the council has failed: {type(error).__name__}: {error}")
        self._council.fail(finish.why)
        return [finish]

    def _attend(self, connection: socket.socket, _: str) -> None:
        """Hear a supervisor, which greets first, until its line ends."""
        line = Line(connection)
        member: int | None = None
        with self._lock:
            self._lines.add(line)
        try:
            for report in line.messages():
                if member is None and isinstance(report, Joined):
                    member = report.index
                if member is None or not isinstance(report, Report):
                    break
                self._wait_for_seat(member, line)
                self._take(member, line, report)
        except LinkLost:
            pass
        finally:
            line.close()
            with self._lock:
                self._lines.discard(line)
                if member is not None and self._seats.get(member) is line:
                    del self._seats[member]
                    self._council.lose(member)

    def _wait_for_seat(self, member: int, line: Line) -> None:
        """Wait until it is clear whether another line of a member is alive.

        It may be an earlier one whose host has failed: it is silent then, and soon found lost. If
        it is alive, two claim this number, and the council decides.
        """
        came = line.heard
        while (other := self._seats.get(member, line)) is not line and line in self._lines:
            if other.heard - came > _SURE_SECONDS:
                return
            time.sleep(_TICK_SECONDS)

    def _take(self, member: int, line: Line, report: Report) -> None:
        """Pass a report to the council; raises `LinkLost` once a refused supervisor has gone."""
        with self._lock:
            self._seats.setdefault(member, line)
            try:
                refusal = self._council.receive(member, report)
            except Damaged as error:
                raise LinkLost(str(error)) from error
            except Exception as error:
                self._fail(error)
                return
            if refusal is None:
                return
            if self._seats[member] is line:
                del self._seats[member]
        line.send(refusal)
        for _ in line.messages():
            pass  # said before it has read the order to leave


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
      until: when to stop waiting, by `time.monotonic`.
      gives_up: function that returns whether to return None rather than keep waiting.
      log: function that receives a line, once, if somebody else answers.

    Raises:
      LinkLost: supervisor 0 could not be reached in time.
    """
    is_told = False
    while not gives_up():
        left = max(1.0, until - time.monotonic())
        connection = None
        try:
            connection = socket.create_connection(address, min(left, SILENCE_SECONDS))
            prove(connection, secret, CALLER)
            line = Line(connection)
            line.send(greet(str(connection.getsockname()[0])))
            line.receive()
            return line
        except OSError as error:
            if connection is not None:
                connection.close()
            reason = _OTHERS if isinstance(error, Unproved) else str(error)
            message = describe_absence(address, reason)
            if time.monotonic() > until:
                raise LinkLost(message) from error
            if reason == _OTHERS and not is_told:
                is_told = True
                log(message)
            time.sleep(_RETRY_SECONDS)
    return None


def describe_absence(address: tuple[str, int], reason: str) -> str:
    """Return a message that supervisor 0 cannot be reached, why, and what to do."""
    where = f"{address[0]}:{address[1]}"
    return f"no supervisor 0 at {where} ({reason}); start it there, and let hosts reach this port"
