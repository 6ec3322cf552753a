"""Find the secret of a run, and let only those who know it speak to a supervisor.

Both ends of a connection prove the secret before anything else is read: each sends a random number,
then the HMAC of both numbers; the listener answers only who has proved it. The secret stays unsaid,
but what follows is neither encrypted nor signed. Imports no JAX.
"""

import errno
import hmac
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.files import follow_references, locate, read_files, read_overrides
from maxpipe.config.sections import Config
from maxpipe.config.shipped import locate_config, names_config
from maxpipe.config.values import Scalar
from maxpipe.storage.local_files import cache_directory
from maxpipe.storage.object_store import is_remote

SECRET = "MAXPIPE_SECRET"
CALLER, LISTENER = "caller", "listener"

_PROOF_SECONDS = 5.0
_LETTERS = 64  # of a random number, and of a proof
_ACCEPT_SECONDS = 0.2


def run_secret(command: Sequence[str], count: int) -> str:
    """Return the secret of a run of `count` supervisors.

    It is MAXPIPE_SECRET, which is taken out of the environment. Without that it is in a file that
    only this user may read, in the `output_dir` of the training, which all hosts share. For another
    command it is in `~/.cache/maxpipe`.

    Raises:
      ConfigError: there is no secret, and no place for one that only this user may read.
    """
    secret = os.environ.pop(SECRET, "")
    if secret or count == 1:
        return secret or secrets.token_hex(16)
    try:
        return _secret_in(_output_dir(command) or cache_directory(""))
    except (OSError, RuntimeError) as error:  # the latter without a home directory
        reason = getattr(error, "strerror", None) or error
        message = f"no secret for the supervisors of this run: {reason}; set {SECRET} to the same "
        raise ConfigError(Problem("", f"{message}random text for all of them")) from error


def _secret_in(directory: Path) -> str:
    """Return the secret of this user in a directory, made if there is none."""
    path = directory / f".supervisors-{os.geteuid()}"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        number, scratch = tempfile.mkstemp(prefix=path.name, dir=directory)  # the user's alone
        try:
            with os.fdopen(number, "w") as file:
                file.write(secrets.token_hex(32))
            with suppress(FileExistsError):  # another supervisor was faster
                os.link(scratch, path)
        finally:
            os.unlink(scratch)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o77:
            raise PermissionError(errno.EPERM, f"others may read {path}, or own it")
        secret = file.read(1000)
    if not secret:
        raise OSError(errno.EINVAL, f"{path} is empty")
    return secret


def _output_dir(command: Sequence[str]) -> Path | None:
    """Return `output_dir` of a command that trains; None if it is another one, or no directory.

    Variants need not be known here, so the configuration is not checked.
    """
    starts = [
        i
        for i, word in enumerate(command, 1)
        if word == "maxpipe.train" or (word == "train" and "maxpipe" in command[i - 2])
    ]
    words = command[starts[0] :] if starts else []
    file = next(filter(names_config, words), None)
    if file is None:
        return None
    settings = read_files(locate_config(file))[0]
    settings += read_overrides([word for word in words if "=" in word])[0]
    chosen = follow_references({setting.key: setting for setting in settings})[0]
    setting = locate(chosen).get("output_dir")
    if setting is None:
        return Path(Config().output_dir)
    if not isinstance(setting.raw, Scalar) or is_remote(setting.raw.text):
        return None  # the trainer refuses it
    return Path(setting.raw.text)


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
