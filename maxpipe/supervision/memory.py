"""Give a trainer a directory in this host's memory that outlives it and ends with its supervisor.

What lies in it is `maxpipe.checkpoint.replicas`'s to know. Imports no JAX.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MEMORY = "MAXPIPE_MEMORY"

_SHARED = Path("/dev/shm")  # in memory on every Linux
_PREFIX = "maxpipe-memory-"


@contextmanager
def shared_memory() -> Iterator[Path | None]:
    """Yield a new directory in memory, removed at the end; None where there is no such place.

    The owner holds a lock on it, which ends even with a process that is killed. Directories of such
    owners are removed here.
    """
    if not os.access(_SHARED, os.W_OK):
        yield None
        return
    _remove_orphans()
    # It gets its name when it is locked, so that no other supervisor takes it for an orphan.
    unlocked = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=_SHARED))
    lock = os.open(unlocked, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    directory = unlocked.rename(_SHARED / unlocked.name.removeprefix("."))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def hold(directory: Path) -> None:
    """Make a directory in memory again if it was removed from outside, and own it again.

    The new lock ends with this process.
    """
    directory.mkdir(exist_ok=True)
    directory.chmod(0o700)  # whatever has made it again first
    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # by this process: the directory was not removed
        os.close(lock)


def memory_of_process() -> Path | None:
    """Return the directory in memory that this process's supervisor has passed to it."""
    path = os.environ.get(MEMORY)
    return Path(path) if path else None


def _remove_orphans() -> None:
    """Remove directories in memory whose owners were killed."""
    for directory in _SHARED.glob(f"{_PREFIX}*"):
        # Others' directories cannot be opened, or are locked, or gone meanwhile.
        with suppress(OSError):
            descriptor = os.open(directory, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
            finally:
                os.close(descriptor)
