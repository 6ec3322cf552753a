"""Let only those who know a secret speak to a supervisor.

Both ends of a connection prove the secret before anything else is read: each sends a random number,
then the HMAC of both numbers; the listener answers only who has proved it. The secret stays unsaid,
but what follows is neither encrypted nor signed. Imports no JAX.
"""

import errno
import hmac
import ipaddress
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

CALLER, LISTENER = "caller", "listener"

_PROOF_SECONDS = 5.0
_LETTERS = 64  # of a random number, and of a proof
_ACCEPT_SECONDS = 0.2
_MOST_UNPROVED = 32  # at once; strangers must not take the files that supervisor 0 needs
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class Unproved(ConnectionError):
    """The other side has not proved that it knows the secret."""


def prove(connection: socket.socket, secret: str, side: str) -> None:
    """Prove a secret to the other side as `CALLER` or `LISTENER`, and see that it knows it too.

    Raises:
      Unproved: it does not, within a few seconds.
    """
    until = time.monotonic() + _PROOF_SECONDS
    own = secrets.token_hex(_LETTERS // 2).encode()
    try:
        connection.settimeout(_PROOF_SECONDS)
        connection.sendall(own)
        other = _receive(connection, until)
        if side == CALLER:
            connection.sendall(_proof(secret, CALLER, own, other))
        expected = _proof(secret, LISTENER if side == CALLER else CALLER, other, own)
        if not hmac.compare_digest(_receive(connection, until), expected):
            raise Unproved("another secret")
        if side == LISTENER:
            connection.sendall(_proof(secret, LISTENER, own, other))
    except OSError as error:
        raise Unproved(str(error)) from error


def _proof(secret: str, side: str, own: bytes, other: bytes) -> bytes:
    text = f"maxpipe {side} ".encode() + own + other
    return hmac.new(os.fsencode(secret), text, "sha256").hexdigest().encode()


def _receive(connection: socket.socket, until: float) -> bytes:
    received = b""
    while len(received) < _LETTERS:
        connection.settimeout(max(0.001, until - time.monotonic()))
        piece = connection.recv(_LETTERS - len(received))
        if not piece:
            raise Unproved("closed")
        received += piece
    return received


class Listener:
    """Accepts connections within a context, and passes on those whose callers prove a secret.

    Args:
      host: name or address of this machine by which others reach it; it listens only there.
      port: port to listen at; 0 for any.
      secret: function that returns the secret; None refuses everyone.
      handle: function that receives a connection, to be closed by it, and the secret; called in a
        thread for each connection.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: Callable[[], str | None],
        handle: Callable[[socket.socket, str], None],
    ):
        self._secret, self._handle = secret, handle
        self._socket = _listen(host, port)
        self._socket.settimeout(_ACCEPT_SECONDS)
        address = self._socket.getsockname()
        self.port = int(address[1])
        is_everywhere = ipaddress.ip_address(address[0]).is_unspecified
        # An address at which this machine itself reaches it.
        self.own_host = "localhost" if is_everywhere else str(address[0])
        self._unproved = threading.Semaphore(_MOST_UNPROVED)
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            if not self._unproved.acquire(timeout=_ACCEPT_SECONDS):
                continue
            try:
                connection = self._socket.accept()[0]
                threading.Thread(target=self._admit, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # none has come, or too many files or threads
                self._unproved.release()
                self._closed.wait(_ACCEPT_SECONDS / 10)

    def _admit(self, connection: socket.socket) -> None:
        secret = self._secret()
        try:
            if secret is None:
                raise Unproved("no secret")
            prove(connection, secret, LISTENER)
        except Unproved:
            connection.close()
            return
        finally:
            self._unproved.release()
        self._handle(connection, secret)


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of a host, IPv4 rather than IPv6.

    If none of them is this machine's, or they lead others elsewhere, it listens at all addresses.
    """
    try:
        found = sorted(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except socket.gaierror:
        found = []
    for family, *_, address in found:
        is_loopback = ipaddress.ip_address(address[0]).is_loopback
        if is_loopback and host not in ("localhost", address[0]):
            continue  # its name in its own /etc/hosts
        try:
            return socket.create_server(address, family=family)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)
