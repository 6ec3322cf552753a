"""Files in object stores (`s3://`, `gs://`), copied to this machine through fsspec when they are first used.

Rows read documents in any order, one at a time, which no object store is made for.
"""

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxpipe.data.local_copy import local_copy
from maxpipe.object_store import explained, open_store, unusable

KEY = "data.path"


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
    with explained(path, KEY):
        store = open_store(path, KEY)
        return [_copy(store, f"{protocol}://{name}", cache_dir) for name in sorted(_expand_remote(store, path, suffixes))]


def _expand_remote(store: Any, path: str, suffixes: Sequence[str]) -> list[str]:
    """Names of files, without the protocol."""
    if "*" in path or "?" in path or "[" in path:
        return [name for name in store.glob(path) if store.isfile(name)]
    if store.isfile(path):
        return [path.partition("://")[2]]
    return [name for name in store.find(path) if name.endswith(tuple(suffixes))]


def _copy(store: Any, file: str, cache_dir: str) -> str:
    def write(target: Path) -> None:
        try:
            store.get_file(file, str(target))
        except OSError as error:
            # Only the place of the copy can be full; for all else the store is to blame, as the place is a fresh one.
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise unusable(file, error, KEY) from error

    return local_copy(file, store.ukey(file), "".join(Path(file).suffixes[-2:]), cache_dir, write)
