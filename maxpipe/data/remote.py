"""Files in object stores (`s3://`, `gs://`), copied to this machine through fsspec when they are first used.

Rows read documents in any order, one at a time, which no object store is made for.
"""

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.data.local_copy import local_copy
from maxpipe.data.optional import optional

# Protocol: (library of fsspec's that speaks it = extra that installs it, options, what credentials come from).
STORES: dict[str, tuple[str, dict[str, Any], str]] = {
    "s3": (
        "s3fs",
        {"config_kwargs": {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 2}}},
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE); AWS_ENDPOINT_URL for stores other than AWS",
    ),
    "gs": ("gcsfs", {"token": "google_default"}, "GOOGLE_APPLICATION_CREDENTIALS to the path of a key file"),
}


def is_remote(path: str) -> bool:
    """Whether the path begins with a protocol."""
    return "://" in path


def fetch(path: str, suffixes: Sequence[str], cache_dir: str) -> list[str]:
    """Local copies of the files of a URL, which may be a file, a directory or a glob; empty if there are none.

    Args:
      path: such as `s3://bucket/corpus/*.jsonl`.
      suffixes: endings that a file in a directory must have.
      cache_dir: `data.cache_dir`.

    Raises:
      ConfigError: no library speaks the protocol, the store lets nobody in, or does not answer.
    """
    protocol = path.partition("://")[0]
    if protocol not in STORES:
        known = ", ".join(f"{name}://" for name in STORES)
        raise ConfigError(Problem("data.path", f"{path}: there is no {protocol}:// here; it may be {known}"))
    library, options, credentials = STORES[protocol]
    try:
        with optional(library, protocol, "data.path"):
            import fsspec

            store = fsspec.filesystem(protocol, skip_instance_cache=True, **options)
        files = sorted(_expand(store, path, suffixes))
        return [_copy(store, file, cache_dir, credentials) for file in files]
    except ConfigError:
        raise
    # Every store has errors of its own, from the network's to "no such bucket".
    except Exception as error:
        raise _unreadable(path, error, credentials) from error


def _expand(store: Any, path: str, suffixes: Sequence[str]) -> list[str]:
    if "*" in path or "?" in path or "[" in path:
        return [name for name in store.glob(path) if store.isfile(name)]
    if store.isfile(path):
        return [path]
    return [name for name in store.find(path) if name.endswith(tuple(suffixes))]


def _copy(store: Any, file: str, cache_dir: str, credentials: str) -> str:
    def write(target: Path) -> None:
        try:
            store.get_file(file, str(target))
        except OSError as error:
            # Only the place of the copy can be full; for all else the store is to blame, as the place is a fresh one.
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise _unreadable(file, error, credentials) from error

    return local_copy(file, store.ukey(file), "".join(Path(file).suffixes[-2:]), cache_dir, write)


def _unreadable(path: str, error: Exception, credentials: str) -> ConfigError:
    message = f"{path} cannot be read: {type(error).__name__}: {error}; credentials come from {credentials}"
    return ConfigError(Problem("data.path", message))
