"""Give a trainer a directory in this host's memory that outlives it and ends with its supervisor.

`maxpipe.checkpoint.replicas` describes its contents. Imports no JAX.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

MEMORY = "MAXPIPE_MEMORY"

_SHARED = Path("/dev/shm")  # in memory on every Linux
_PREFIX, _LOCK = "maxpipe-replicas-", ".lock"


def hold(directory: Path) -> None:
    """Make a process's directory in memory again if it was removed from outside.

    Raises:
      OSError: this is impossible, for example for lack of space.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    directory.chmod(0o700)  # whoever has made it again first


@contextmanager
def shared_memory() -> Iterator[Path | None]:
    """Yield a new directory in memory, removed at the end; None where there is none, or no room.

    Directories of owners that were killed are removed here, also those of an earlier container of
    this pod: the owner of each locks a file beside it, and the lock ends with the process.
    """
    for file in _SHARED.glob(f"{_PREFIX}*{_LOCK}"):
        with suppress(OSError), file.open("rb") as lock:  # others' cannot be opened, or are locked
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(file.with_suffix(""), ignore_errors=True)
            file.unlink()
    with ExitStack() as stack:
        try:
            lock_number, name = tempfile.mkstemp(_LOCK, _PREFIX, _SHARED)
            stack.callback(os.close, lock_number)
            stack.callback(Path(name).unlink, missing_ok=True)
            fcntl.flock(lock_number, fcntl.LOCK_EX)
            directory = Path(name).with_suffix("")
            hold(directory)
        except OSError:  # without it there are no replicas, but the run goes on
            yield None
            return
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        yield directory


def memory_of_process() -> Path | None:
    """Return the directory in memory that this process's supervisor has passed to it."""
    path = os.environ.get(MEMORY)
    return Path(path) if path else None
