"""Let only those who know a secret speak to a supervisor.

Both ends of a connection prove the secret before anything else is read: each sends a random number,
then the HMAC of both numbers; the listener answers only who has proved it. The secret stays unsaid,
but what follows is neither encrypted nor signed. Imports no JAX.
"""

import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

CALLER, LISTENER = "caller", "listener"

_PROOF_SECONDS = 5.0
_LETTERS = 64  # of a random number, and of a proof
_ACCEPT_SECONDS = 0.2


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
        handle: Callable[[socket.socket, str], object],
    ):
        self._secret, self._handle = secret, handle
        self._socket = _listen(host, port)
        self._socket.settimeout(_ACCEPT_SECONDS)
        own_host, self.port = self._socket.getsockname()[:2]
        # An address at which this machine itself reaches it.
        self.own_host = "localhost" if own_host == "::" else own_host
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection = self._socket.accept()[0]
                threading.Thread(target=self._admit, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # none has come, or too many files or threads
                self._closed.wait(_ACCEPT_SECONDS / 10)

    def _admit(self, connection: socket.socket) -> None:
        secret = self._secret()
        try:
            if secret is None:
                raise Unproved("no secret")
            prove(connection, secret, LISTENER)
        except Unproved:
            connection.close()
        else:
            self._handle(connection, secret)


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the IPv4 address of a host, or else at all addresses."""
    with suppress(OSError):  # behind a proxy the address is not this machine's
        address = socket.gethostbyname(host)
        # Its own /etc/hosts may give the name of a host an address that leads others elsewhere.
        if not address.startswith("127.") or host in ("localhost", address):
            return socket.create_server((address, port))
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)
