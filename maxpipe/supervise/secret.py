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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.files import follow_references, locate, read_files, read_overrides
from maxpipe.config.sections import Config
from maxpipe.config.shipped import locate_config, names_config
from maxpipe.config.values import Scalar
from maxpipe.storage.local_files import cache_directory
from maxpipe.storage.object_store import is_remote
from maxpipe.supervise.process import running

SECRET = "MAXPIPE_SECRET"
CALLER, LISTENER = "caller", "listener"

_PROOF_SECONDS = 5.0
_BYTES = 32  # of a random number, and of a proof
_ACCEPT_SECONDS = 0.2


def run_secret(command: Sequence[str], count: int) -> str:
    """Return the secret of a run of `count` supervisors.

    It is MAXPIPE_SECRET, which is taken out of the environment, or in a file that only this user
    may read: in the `output_dir` of a training, for another command in `~/.cache/maxpipe`. Raises
    ConfigError if there is neither.
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
        with os.fdopen(number, "w") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):  # another supervisor was faster
            os.link(scratch, path)
        os.unlink(scratch)
    status, secret = path.stat(), path.read_text()
    if status.st_uid != os.geteuid() or status.st_mode & 0o77 or not secret:
        raise PermissionError(errno.EPERM, f"others may read {path}, or own it, or it is empty")
    return secret


def _output_dir(command: Sequence[str]) -> Path | None:
    """Return `output_dir` of a command that trains; None if it is another one, or no directory."""
    # Variants need not be known here, so the configuration is not checked.
    trains = [i for i, word in enumerate(command) if word in ("maxpipe.train", "train")]
    words = command[trains[0] + 1 :] if trains else []
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


def prove(connection: socket.socket, secret: str, side: str) -> None:
    """Prove a secret as `CALLER` or `LISTENER`; ConnectionError if the other side does not."""

    def proof(of: str, first: bytes, second: bytes) -> bytes:
        text = f"maxpipe {of} ".encode() + first + second
        return hmac.digest(os.fsencode(secret), text, "sha256")

    own, is_known = secrets.token_bytes(_BYTES), False
    with suppress(OSError, EOFError):
        connection.settimeout(_PROOF_SECONDS)
        connection.sendall(own)
        other = _receive(connection)
        if side == CALLER:
            connection.sendall(proof(CALLER, own, other))
        expected = proof(LISTENER if side == CALLER else CALLER, other, own)
        is_known = hmac.compare_digest(_receive(connection), expected)
        if is_known and side == LISTENER:
            connection.sendall(proof(LISTENER, own, other))
    if not is_known:
        who = f"another program answers, or a supervisor with another output_dir or {SECRET}"
        raise ConnectionError(who)


def _receive(connection: socket.socket) -> bytes:
    received = b""
    while len(received) < _BYTES:
        if not (piece := connection.recv(_BYTES - len(received))):
            raise EOFError
        received += piece
    return received


@contextmanager
def listening(
    host: str,
    port: int,
    secret: Callable[[], str],
    handle: Callable[[socket.socket, str], object],
) -> Iterator[int]:
    """Pass connections whose callers prove the secret to `handle`, in threads; yield the port.

    Only at "localhost" other machines cannot call; port 0 is any. An empty secret refuses everyone.
    `handle` receives the secret, too, and closes the connection.
    """

    def admit(connection: socket.socket) -> None:
        with suppress(ConnectionError):
            if known := secret():
                prove(connection, known, LISTENER)
                handle(connection, known)
                return
        connection.close()

    def accept(closed: threading.Event) -> None:
        while not closed.is_set():
            try:
                connection = server.accept()[0]
                threading.Thread(target=admit, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # none has come, or too many files or threads
                closed.wait(_ACCEPT_SECONDS / 10)

    is_local = host == "localhost"
    is_dual = not is_local and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    place = host * is_local, port
    with socket.create_server(place, family=family, dualstack_ipv6=is_dual) as server:
        server.settimeout(_ACCEPT_SECONDS)
        with running(accept, "listener"):
            yield server.getsockname()[1]
