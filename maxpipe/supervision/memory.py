"""Give a trainer a directory in this host's memory that outlives it and ends with its supervisor.

`maxpipe.checkpoint.replicas` describes its contents. Imports no JAX.
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


class SharedMemory:
    """A directory in memory that this process owns by a lock, which ends with the process.

    Args:
      path: the directory.
      lock: locked descriptor of the directory.
    """

    def __init__(self, path: Path, lock: int):
        self.path = path
        self._lock = lock

    def hold(self) -> None:
        """Make and lock the directory again if it was removed from outside.

        Raises:
          OSError: this is impossible, for example for lack of space.
        """
        while not self._is_held():
            self.path.mkdir(mode=0o700, exist_ok=True)
            self.path.chmod(0o700)  # whoever has made it again first
            with suppress(FileNotFoundError):  # a supervisor took it for an orphan's and removed it
                lock = os.open(self.path, os.O_RDONLY)
                os.close(self._lock)
                self._lock = lock
                fcntl.flock(lock, fcntl.LOCK_EX)  # waits for such a supervisor

    def end(self) -> None:
        """Remove the directory and give up the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def _is_held(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._lock), self.path.stat())
        except FileNotFoundError:
            return False


@contextmanager
def shared_memory() -> Iterator[SharedMemory | None]:
    """Yield a new directory in memory, removed at the end; None where there is none, or no room.

    Directories of owners that were killed are removed here.
    """
    _remove_orphans()
    unlocked = _make_directory()
    if unlocked is None:
        yield None
        return
    # It gets its name once it is locked, so that no other supervisor takes it for an orphan.
    lock = os.open(unlocked, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    memory = SharedMemory(unlocked.rename(_SHARED / unlocked.name.removeprefix(".")), lock)
    try:
        yield memory
    finally:
        memory.end()


def memory_of_process() -> Path | None:
    """Return the directory in memory that this process's supervisor has passed to it."""
    path = os.environ.get(MEMORY)
    return Path(path) if path else None


def _make_directory() -> Path | None:
    with suppress(OSError):  # without it there are no replicas, but the run goes on
        return Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=_SHARED))
    return None


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
