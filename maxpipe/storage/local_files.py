"""Write files atomically, and make local copies of remote and of compressed files.

Rows of a batch read documents in any order, one at a time, which neither object stores nor
compressed files allow. Such files are copied once to `data.cache_dir` and read from there.
"""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import secrets
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from maxpipe.config.catalog import PACKED, SOURCES
from maxpipe.config.errors import ConfigError, Problem, redacted
from maxpipe.config.imports import optional
from maxpipe.config.terminal import at_end
from maxpipe.storage.object_store import explained, open_store

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from fsspec import AbstractFileSystem
    from pyarrow import NativeFile

_PATH = "data.path"  # the key named in errors about a file itself
_CACHE = "data.cache_dir"  # the key named in errors about the place of its copy
_LIMIT = "data.cache_limit"
_NAMES_SHOWN = 10  # of the files that are left out
RECORD = "encoding.json"  # what `maxpipe.tokenize encode` writes next to token files
_COMPANIONS = f"{os.sep}{RECORD}", *(each.companion for each in SOURCES.values() if each.companion)
_SHARE_OF_FREE_SPACE = 0.9  # that copies may take without a limit
_PIECE = 1 << 20  # bytes of a file unpacked at a time
READ_LIMIT = 1 << 16  # bytes read of a file for its digest
_END, _SAMPLE, _NUM_SAMPLES = 1 << 14, 1 << 12, 8  # two ends and eight samples make the limit


def write_atomically(path: Path, pieces: Iterable[bytes], *, durable: bool = True) -> None:
    """Replace the contents of a file; readers find either the old contents or the new.

    Several processes may do so at the same time. If it is `durable`, this also holds after a crash
    of the machine, which needs a flush to disk. Raises OSError.
    """
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with scratch.open("wb") as file:
            file.writelines(pieces)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:  # also one of the pieces, and Ctrl-C: they may be as large as a model
        scratch.unlink(missing_ok=True)
        raise


def sampled_digest(path: str, size: int) -> str:
    """Return a digest of the first `size` bytes of a file, reading at most `READ_LIMIT` of them."""
    digest = hashlib.blake2b(digest_size=8)
    pieces = [(0, size)]
    if size > READ_LIMIT:
        middle = [
            (_END + i * (size - 2 * _END - _SAMPLE) // (_NUM_SAMPLES - 1), _SAMPLE)
            for i in range(_NUM_SAMPLES)
        ]
        pieces = [(0, _END), *middle, (size - _END, _END)]
    with open(path, "rb", buffering=0) as file:
        for start, length in pieces:
            digest.update(os.pread(file.fileno(), length, start))
    return digest.hexdigest()


def local_copy(
    origin: str,
    version: object,
    suffix: str,
    cache_dir: str,
    write: Callable[[BinaryIO], object],
    limit: int = 0,
    size: int = 0,
) -> str:
    """Return the path of a file's copy in the cache, made unless this version is already there.

    A line on stderr announces a copy that has to be made. Several processes may copy the same file
    at once: each writes a file of its own, and the last to finish replaces the others.

    Args:
      origin: the file, as the user knows it.
      version: value that changes whenever the content does, such as size and time.
      cache_dir, limit: `data.cache_dir`, `data.cache_limit`.
      write: function that writes the copy; its OSErrors are taken for the cache's.
      size: least size of the copy in bytes, if that is known.

    Raises ConfigError if the copy cannot be written to the cache, or takes more than the limit.
    """
    directory = cache_directory(cache_dir)
    name = f"{origin}\0{version}\0{suffix}".encode("utf-8", "surrogateescape")
    target = directory / (hashlib.sha256(name).hexdigest()[:24] + suffix)
    if target.is_file():
        return str(target)
    try:
        with scratch_directory(directory) as scratch:
            room = int(shutil.disk_usage(directory).free * _SHARE_OF_FREE_SPACE)
            if limit:
                held = sum(file.stat().st_size for file in directory.iterdir() if file.is_file())
                room = limit - held
            may_take = f"which may take {_gibibytes(room)} more ({_LIMIT})"
            print(redacted(f"copying {origin} to {directory}, {may_take}"), file=sys.stderr)
            unfinished = scratch / f"unfinished{suffix}"
            if size > room:
                raise _Full(room)
            with io.BufferedWriter(_Bounded(unfinished, room)) as out:
                write(out)
            os.replace(unfinished, target)
    except OSError as error:
        message = f"cannot keep a copy of {origin} in {directory}: {error.strerror or error}"
        key = _LIMIT if isinstance(error, _Full) else _CACHE
        raise ConfigError(Problem(key, message)) from error
    return str(target)


def _gibibytes(count: int) -> str:
    return f"{max(count, 0) / (1 << 30):,.3g} GiB"


class _Full(OSError):
    def __init__(self, room: int):
        remedy = f"raise this limit, remove old copies, or name another {_CACHE}"
        super().__init__(f"it takes more than the {_gibibytes(room)} that are left; {remedy}")


class _Bounded(io.FileIO):
    """A new file that refuses to grow beyond `room` bytes."""

    def __init__(self, path: Path, room: int):
        super().__init__(str(path), "w")
        self._room = room

    def write(self, piece: "ReadableBuffer") -> int:
        if self.tell() + memoryview(piece).nbytes > self._room:
            raise _Full(self._room)
        return super().write(piece)


@contextmanager
def scratch_directory(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new directory for large files, removed at the end, also if a signal ends the process.

    It lies in `parent`, made if need be, or where temporary files do.
    """
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="maxpipe-copy-", dir=parent))
    with at_end(partial(shutil.rmtree, scratch, ignore_errors=True)):
        yield scratch


def cache_directory(cache_dir: str) -> Path:
    """Return the directory of `data.cache_dir`; `~/.cache/maxpipe` if it is empty."""
    return Path(cache_dir or "~/.cache/maxpipe").expanduser()


def version_of(path: str) -> tuple[int, int]:
    """Return size in bytes and modification time in nanoseconds of a local file."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def each_once(names: Iterable[str]) -> list[str]:
    """Return sorted names, the first one of each entry of a directory.

    A link to a file is an entry of its own, so a file may be read several times by intention.
    """
    real_directory = cache(os.path.realpath)
    of_entry: dict[str, str] = {}
    for name in sorted(names):
        parent, last = os.path.split(name)
        of_entry.setdefault(os.path.join(real_directory(parent), last), name)
    return [*of_entry.values()]


def with_endings(names: Sequence[str], suffixes: Sequence[str], place: str) -> list[str]:
    """Return the names that end in one of `suffixes`, in letters of either case; "" is any ending.

    Lines on stderr say, once, which are left out, except companions, and which differ only in their
    endings. `names` are of files below `place`, a directory, URL or glob, without hidden ones.
    """
    chosen: dict[str, list[str]] = {}  # by name without the ending
    left_out = []
    for name in names:
        ends = [len(suffix) for suffix in suffixes if name.lower().endswith(suffix)]
        if ends:
            chosen.setdefault(name[: len(name) - max(ends)], []).append(name)
        elif not name.endswith(_COMPANIONS):
            left_out.append(name)
    if left_out:
        remedy = f"not {shown(suffixes)}; files named by a glob are read whatever they end in"
        _print_once(f"{place}: left out {_some(left_out, place)}: {remedy}")
    if doubles := [min(same, key=len) for same in chosen.values() if len(same) > 1]:
        remedy = "all are read; keep one of each if they are copies"
        _print_once(f"{place}: {_some(doubles, place)} also with another ending: {remedy}")
    return [name for same in chosen.values() for name in same]


def shown(suffixes: Sequence[str]) -> str:
    plain = [f"*{suffix}" for suffix in suffixes if suffix and not suffix.endswith(PACKED)]
    return " or ".join(plain) or "files"


def _some(names: Sequence[str], place: str) -> str:
    first = ", ".join(os.path.relpath(name, place) for name in sorted(names)[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{first} and {more:,} more" if more > 0 else first


@cache
def _print_once(line: str) -> None:
    print(redacted(line), file=sys.stderr, flush=True)


def fetch(url: str, suffixes: Sequence[str], cache_dir: str, limit: int = 0) -> list[str]:
    """Return the paths of local copies of a URL's files, by name in the store; empty if none match.

    The URL is of a file, a directory, whose files must have one of the endings, or a glob, such as
    `s3://bucket/corpus/*.jsonl`. Raises ConfigError as `open_store` and `explained`.
    """
    protocol = url.partition("://")[0]
    with explained(url, _PATH):
        store = open_store(url, _PATH)
        names = sorted(_remote_files(store, url, suffixes))
        return [_fetch_file(store, f"{protocol}://{name}", cache_dir, limit) for name in names]


class RemoteFile(NamedTuple):
    """A file where it lies: its path or URL, size in bytes, and entity tag, or version."""

    name: str
    size: int
    etag: str


def list_remote(url: str, suffixes: Sequence[str]) -> list[RemoteFile]:
    """Return a URL's files by name, without reading them; arguments and errors as for `fetch`."""
    files = []
    with explained(url, _PATH):
        store = open_store(url, _PATH)
        for name, info in sorted(_remote_files(store, url, suffixes).items()):
            # S3 calls it ETag, Google's store etag.
            etag = info.get("ETag") or info.get("etag") or store.ukey(name)
            name = f"{url.partition('://')[0]}://{name}"
            files.append(RemoteFile(name, int(info["size"]), str(etag).strip('"')))
    return files


def local_file(path: str) -> RemoteFile:
    version = version_of(path)
    return RemoteFile(path, version[0], str(version))


def _remote_files(
    store: "AbstractFileSystem", url: str, suffixes: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return what the store says of each file, by name: one request for a thousand of them."""
    name = url.partition("://")[2]
    if "*" in url or "?" in url or "[" in url:
        found = store.glob(url, detail=True)
        return {name: info for name, info in found.items() if info["type"] == "file"}
    if store.isfile(url):
        return {name: store.info(url)}
    found = store.find(url, detail=True)
    return {file: found[file] for file in with_endings([*found], suffixes, name)}


def _fetch_file(store: "AbstractFileSystem", url: str, cache_dir: str, limit: int) -> str:
    def write(out: BinaryIO) -> None:
        with explained(url, _PATH):
            store.get_file(url, out.name)

    suffix = "".join(Path(url).suffixes[-2:])
    return local_copy(url, store.ukey(url), suffix, cache_dir, write, limit, store.size(url) or 0)


def unpacked(path: str, cache_dir: str, limit: int = 0) -> str:
    """Return the path of an uncompressed file: `path` itself unless it ends as `PACKED` says.

    Raises ConfigError if the file cannot be read or is damaged, if its copy takes more than the
    limit, or if pyarrow, which reads zstd, is not installed.
    """
    if not path.lower().endswith(PACKED):
        return path

    def write(out: BinaryIO) -> None:
        out.writelines(_pieces(path))

    return local_copy(
        path, version_of(path), Path(path).with_suffix("").suffix, cache_dir, write, limit
    )


def _open_zstd(path: str) -> "NativeFile":
    with optional("pyarrow", "data", _PATH):
        import pyarrow
    return pyarrow.input_stream(path, compression="zstd")


_OPENERS: dict[str, "Callable[[str], io.BufferedIOBase | NativeFile]"] = {
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _open_zstd,
    ".zstd": _open_zstd,
}


def _pieces(path: str) -> Iterator[bytes]:
    try:
        with _OPENERS[Path(path).suffix.lower()](path) as packed:
            while piece := packed.read(_PIECE):
                yield piece
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ConfigError(Problem(_PATH, f"{path} cannot be unpacked: {error}")) from error


def files_in(directory: Path) -> dict[str, object]:
    """Return TensorStore's specification of the files in a directory."""
    # TensorStore refuses a path with `..` in it.
    return {"driver": "file", "path": f"{directory.resolve()}/"}
