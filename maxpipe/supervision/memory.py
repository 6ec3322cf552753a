"""Give a trainer a directory in this host's memory that outlives it and ends with its supervisor.

`maxpipe.checkpoint.replicas` describes its contents. Imports no JAX.
"""

import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maxpipe.storage.lease import machine, start_of_process

MEMORY = "MAXPIPE_MEMORY"

_SHARED = Path("/dev/shm")  # in memory on every Linux
# Digest of the machine, and number and start of the process that owns the directory.
_NAME = re.compile(r"maxpipe-replicas-([0-9a-f]{8})-(\d+)-(\d+)-\w+")


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

    Directories of owners that were killed are removed here.
    """
    here, pid = f"{zlib.crc32(machine().encode()):08x}", os.getpid()
    for orphan in _SHARED.glob("maxpipe-replicas-*"):
        owner = _NAME.fullmatch(orphan.name)
        if owner and owner[1] == here and start_of_process(int(owner[2])) != int(owner[3]):
            shutil.rmtree(orphan, ignore_errors=True)
    prefix = f"maxpipe-replicas-{here}-{pid}-{start_of_process(pid) or 0}-"
    try:
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=_SHARED))
    except OSError:  # without it there are no replicas, but the run goes on
        yield None
        return
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def memory_of_process() -> Path | None:
    """Return the directory in memory that this process's supervisor has passed to it."""
    path = os.environ.get(MEMORY)
    return Path(path) if path else None
