"""Local copies of what documents cannot be read from in any order: compressed, columnar and remote files."""

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from maxpipe.config.errors import ConfigError, Problem


def local_copy(origin: str, version: object, suffix: str, cache_dir: str, write: Callable[[Path], None]) -> str:
    """Path of the copy of a file, made the first time and whenever the file has changed; says so when it is made.

    Several processes may ask at once: each writes a file of its own, and the last one to be done stays.

    Args:
      origin: what is copied, as the user knows it.
      version: changes when the content does, such as size and time.
      suffix: ending of the copy's name.
      cache_dir: `data.cache_dir`.
      write: makes the copy at a path; an OSError of its own is one of writing.

    Raises:
      ConfigError: there is no place for it.
    """
    directory = Path(cache_dir).expanduser() if cache_dir else Path.home() / ".cache" / "maxpipe"
    name = hashlib.sha256(f"{origin}\0{version}\0{suffix}".encode()).hexdigest()[:24]
    target = directory / (name + suffix)
    if target.is_file():
        return str(target)
    print(f"copying {origin} to {directory}", file=sys.stderr, flush=True)  # which may take minutes
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            partial = Path(scratch, "partial" + suffix)
            write(partial)
            os.replace(partial, target)
    except OSError as error:
        message = f"cannot keep a copy of {origin} in {directory}: {error.strerror or error}"
        raise ConfigError(Problem("data.cache_dir", message)) from error
    return str(target)


def version_of(path: str) -> tuple[int, int]:
    """Size and time of a local file."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns
