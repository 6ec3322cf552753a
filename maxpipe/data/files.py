"""The files that `data.path` names, and documents that are whole files.

Files in object stores (`s3://`, `gs://`), copied to this machine through fsspec when they are first
used.

Rows read documents in any order, one at a time, which no object store is made for.

Local copies of what documents cannot be read from in any order: compressed, columnar and remote
files.

Compressed files by their endings, unpacked once."""

import errno
import glob
import gzip
import hashlib
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import optional
from maxpipe.storage.object_store import explained, is_remote, open_store, unusable

# Elements looked at together: keeps the temporary of a scan small beside the file.
BLOCK = 1 << 24


class FileDocuments:
    """One document per UTF-8 text file, read when asked for."""

    def __init__(self, paths: Sequence[str]):
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> str:
        """Raises ConfigError if the file is gone or is not UTF-8."""
        path = Path(self._paths[index])
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            message = f"{path} is not UTF-8 text: byte {error.start}"
            raise ConfigError(Problem("data.path", message)) from error
        except OSError as error:
            raise ConfigError(
                Problem("data.path", f"{path} cannot be read: {error.strerror}")
            ) from error


class Spans:
    """Documents that are stretches of files.

    Args:
      spans: per file, start and end of each document, int64 [documents, 2].
    """

    def __init__(self, spans: Sequence[np.ndarray]):
        self._spans = spans
        self._firsts = np.array([0, *accumulate(len(span) for span in spans)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def locate(self, index: int) -> tuple[int, int, int]:
        """Number of the file that holds document `index`, and start and end of the document in it."""
        file = int(np.searchsorted(self._firsts, index, side="right")) - 1
        start, end = self._spans[file][index - self._firsts[file]]
        return file, int(start), int(end)


def find_files(path: str, suffixes: Sequence[str] = ("",), cache_dir: str = "") -> list[str]:
    """The files of a comma-separated list of files, directories and globs, each once; sorted, remote ones last.

    Args:
      path: value of `data.path`. A directory stands for all files beneath it, hidden ones left out.
      suffixes: endings that a file in a directory must have; files named or matched by a glob may
        have any.
      cache_dir: `data.cache_dir`, where copies of remote files are.

    Raises:
      ConfigError: `path` is empty, or one of its parts gives no file.
    """
    found: set[str] = set()
    fetched: dict[str, None] = {}  # in the order of their names in the store
    problems = []
    for part in filter(None, (part.strip() for part in path.split(","))):
        if is_remote(part):
            files = fetch(part, suffixes, cache_dir)
            fetched.update(dict.fromkeys(files))
        else:
            files = _expand(Path(part).expanduser(), suffixes)
            found.update(files)
        if not files:
            endings = " or ".join(f"*{suffix}" for suffix in suffixes)
            message = (
                f"no file at {part!r}; give a file, a glob, or a directory that holds {endings}"
            )
            problems.append(Problem("data.path", message))
    if problems:
        raise ConfigError(*problems)
    if not found and not fetched:
        raise ConfigError(
            Problem("data.path", "this data.source needs a file, a directory or a glob here")
        )
    return [*sorted(found), *fetched]


def _expand(path: Path, suffixes: Sequence[str]) -> list[str]:
    if path.is_file():
        return [str(path)]
    pattern = glob.escape(str(path)) + "/**/*" if path.is_dir() else str(path)
    files = [name for name in glob.glob(pattern, recursive=True) if Path(name).is_file()]
    return [name for name in files if name.endswith(tuple(suffixes))] if path.is_dir() else files


def find_all(array: np.ndarray, value: int) -> np.ndarray:
    """Ascending positions of `value` in a one-dimensional, possibly memory-mapped array; int64."""
    blocks = range(0, len(array), BLOCK)
    return np.concatenate([np.flatnonzero(array[at : at + BLOCK] == value) + at for at in blocks])


def require_content(paths: list[str]) -> list[str]:
    """`paths`; raises ConfigError naming those of zero bytes, which is what broken downloads leave behind."""
    empty = [
        Problem("data.path", f"{path} is empty") for path in paths if not Path(path).stat().st_size
    ]
    if empty:
        raise ConfigError(*empty)
    return paths


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
        return [
            _copy(store, f"{protocol}://{name}", cache_dir)
            for name in sorted(_expand_remote(store, path, suffixes))
        ]


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
            # Only the place of the copy can be full; for all else the store is to blame, as the
            # place is a fresh one.
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise unusable(file, error, KEY) from error

    return local_copy(file, store.ukey(file), "".join(Path(file).suffixes[-2:]), cache_dir, write)


def local_copy(
    origin: str, version: object, suffix: str, cache_dir: str, write: Callable[[Path], None]
) -> str:
    """Path of the copy of a file, made the first time and whenever the file has changed; says so when it is made.

    Several processes may ask at once: each writes a file of its own, and the last one to be done
    stays.

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


GZIP, ZSTD = ".gz", ".zst"
PIECE = 1 << 20


def unpacked(path: str, cache_dir: str) -> str:
    """The path of an uncompressed file: `path` itself unless it ends with `GZIP` or `ZSTD`.

    Raises:
      ConfigError: the file cannot be read or is damaged, or zstandard is not installed.
    """
    if not path.endswith((GZIP, ZSTD)):
        return path
    pieces = _from_gzip if path.endswith(GZIP) else _from_zstd

    def write(target: Path) -> None:
        with target.open("wb") as out:
            out.writelines(pieces(path))

    return local_copy(path, version_of(path), Path(path).with_suffix("").suffix, cache_dir, write)


def _from_gzip(path: str) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") as packed:
            while piece := packed.read(PIECE):
                yield piece
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, str(error)) from error


def _from_zstd(path: str) -> Iterator[bytes]:
    with optional("zstandard", "data", "data.path"):
        import zstandard
    frame = None
    try:
        with open(path, "rb") as packed:
            while piece := packed.read(PIECE):
                # A file that was written in parts has several frames, one after the other.
                while piece:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    yield frame.decompress(piece)
                    piece, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except (OSError, zstandard.ZstdError) as error:
        raise _damaged(path, str(error)) from error
    if frame is not None:
        raise _damaged(path, "it ends in the middle of a frame")


def _damaged(path: str, why: str) -> ConfigError:
    return ConfigError(Problem("data.path", f"{path} cannot be unpacked: {why}"))
