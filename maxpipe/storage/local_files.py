"""Write files atomically, and make local copies of remote and of compressed files.

Rows of a batch read documents in any order, one at a time, which neither object stores nor
compressed files allow. Such files are copied once to `data.cache_dir` and read from there.
"""

import errno
import gzip
import hashlib
import os
import secrets
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from maxpipe.config.errors import ConfigError, Problem, redacted
from maxpipe.config.imports import optional
from maxpipe.config.terminal import at_end
from maxpipe.storage.object_store import explained, is_remote, open_store, unusable

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

GZIP, ZSTD = ".gz", ".zst"

_PATH = "data.path"  # the key named in errors about a file itself
_CACHE = "data.cache_dir"  # the key named in errors about the place of its copy
_SCRATCH = "maxpipe-copy-"  # how the names of directories for unfinished copies begin
_ABANDONED_SECONDS = 24 * 3600  # since the last change of one whose process must have been killed
_PIECE = 1 << 20  # bytes of a compressed file read at a time
READ_LIMIT = 1 << 16  # bytes read of a file for its digest
_END, _SAMPLE, _NUM_SAMPLES = 1 << 14, 1 << 12, 8  # two ends and eight samples make the limit


def write_atomically(path: Path, pieces: Iterable[bytes], *, durable: bool = True) -> None:
    """Replace the contents of a file; readers find either the old contents or the new.

    Several processes may do so at the same time, even in containers with equal process ids.

    Args:
      path: the file.
      pieces: its new contents.
      durable: whether this also holds after a crash of the machine, which needs a flush to disk.

    Raises:
      OSError: the file cannot be written; it holds the old contents.
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
    """Return a digest of the first `size` bytes of a file, reading at most `READ_LIMIT` of them.

    Raises:
      OSError: the file cannot be read.
    """
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
    write: Callable[[Path], None],
) -> str:
    """Return the path of a file's copy in the cache, made unless this version is already there.

    A line on stderr announces a copy that has to be made. Several processes may copy the same file
    at once: each writes a file of its own, and the last to finish replaces the others.

    Args:
      origin: the file, as the user knows it.
      version: value that changes whenever the content does, such as size and time.
      suffix: ending of the copy's name.
      cache_dir: `data.cache_dir`; `~/.cache/maxpipe` if empty.
      write: function that writes the copy to a path; its OSErrors are taken for the cache's.

    Raises:
      ConfigError: the copy cannot be written to the cache.
    """
    directory = cache_directory(cache_dir)
    name = hashlib.sha256(f"{origin}\0{version}\0{suffix}".encode()).hexdigest()[:24]
    target = directory / (name + suffix)
    if target.is_file():
        return str(target)
    print(redacted(f"copying {origin} to {directory}"), file=sys.stderr, flush=True)
    try:
        with scratch_directory(directory) as scratch:
            unfinished = scratch / f"unfinished{suffix}"
            write(unfinished)
            os.replace(unfinished, target)
    except OSError as error:
        message = f"cannot keep a copy of {origin} in {directory}: {error.strerror or error}"
        raise ConfigError(Problem(_CACHE, message)) from error
    return str(target)


@contextmanager
def scratch_directory(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new directory for large files, removed at the end, also if a signal ends the process.

    Those that killed processes have left in the same place are removed after a day.

    Args:
      parent: where to make it, itself made if it does not exist; default: for temporary files.

    Raises:
      OSError: it cannot be made.
    """
    parent = parent or Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    for other in parent.glob(f"{_SCRATCH}*"):
        with suppress(OSError):  # gone meanwhile, or another user's
            changed = max(path.stat().st_mtime for path in (other, *other.rglob("*")))
            if time.time() - changed > _ABANDONED_SECONDS:
                shutil.rmtree(other)
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=parent))
    with at_end(partial(shutil.rmtree, scratch, ignore_errors=True)):
        yield scratch


def cache_directory(cache_dir: str) -> Path:
    """Return the directory of `data.cache_dir`; `~/.cache/maxpipe` if it is empty."""
    return Path(cache_dir).expanduser() if cache_dir else Path.home() / ".cache" / "maxpipe"


def version_of(path: str) -> tuple[int, int]:
    """Return size in bytes and modification time in nanoseconds of a local file."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def each_once(names: Iterable[str]) -> list[str]:
    """Return sorted names, one for each entry of a directory: the one with the fewest links.

    A link to a file is an entry of its own, so a file may be read several times by intention.
    """
    real_directory = cache(os.path.realpath)
    of_entry: dict[str, str] = {}
    for name in sorted(names):
        parent, last = os.path.split(name)
        entry = os.path.join(real_directory(parent), last)
        other = of_entry.setdefault(entry, name)
        if other != name:
            of_entry[entry] = min(other, name, key=_num_links)
    return sorted(of_entry.values())


def _num_links(name: str) -> int:
    return sum(path.is_symlink() for path in (Path(name), *Path(name).parents))


def fetch(url: str, suffixes: Sequence[str], cache_dir: str) -> list[str]:
    """Return the paths of local copies of a URL's files, by name in the store; empty if none match.

    Args:
      url: a file, a directory or a glob, such as `s3://bucket/corpus/*.jsonl`.
      suffixes: endings that a file in a directory must have.
      cache_dir: `data.cache_dir`.

    Raises:
      ConfigError: no library speaks the protocol, or the store refuses access or does not answer.
    """
    assert is_remote(url)
    protocol = url.partition("://")[0]
    with explained(url, _PATH):
        store = open_store(url, _PATH)
        names = sorted(_remote_files(store, url, suffixes))
        return [_fetch_file(store, f"{protocol}://{name}", cache_dir) for name in names]


class RemoteFile(NamedTuple):
    """A file in an object store: its name without protocol, its size in bytes, its entity tag."""

    name: str
    size: int
    etag: str


def list_remote(url: str, suffixes: Sequence[str]) -> list[RemoteFile]:
    """Return a URL's files by name, without reading them; arguments and errors as for `fetch`."""
    files = []
    with explained(url, _PATH):
        store = open_store(url, _PATH)
        for name in sorted(_remote_files(store, url, suffixes)):
            info = store.info(name)
            # S3 calls it ETag, Google's store etag.
            etag = info.get("ETag") or info.get("etag") or store.ukey(name)
            files.append(RemoteFile(name, int(info["size"]), str(etag).strip('"')))
    return files


def _remote_files(store: "AbstractFileSystem", url: str, suffixes: Sequence[str]) -> list[str]:
    """Return the names of a URL's files, without the protocol."""
    if "*" in url or "?" in url or "[" in url:
        return [name for name in store.glob(url) if store.isfile(name)]
    if store.isfile(url):
        return [url.partition("://")[2]]
    return [name for name in store.find(url) if name.endswith(tuple(suffixes))]


def _fetch_file(store: "AbstractFileSystem", url: str, cache_dir: str) -> str:
    def write(target: Path) -> None:
        try:
            store.get_file(url, str(target))
        except OSError as error:
            # The cache is to blame for a full disk only; any other error is the store's, because
            # the target is a new file in a new directory.
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise unusable(url, error, _PATH) from error

    return local_copy(url, store.ukey(url), "".join(Path(url).suffixes[-2:]), cache_dir, write)


def unpacked(path: str, cache_dir: str) -> str:
    """Return the path of an uncompressed file: `path` itself unless it ends in `GZIP` or `ZSTD`.

    Raises:
      ConfigError: the file cannot be read or is damaged, or zstandard is not installed.
    """
    if not path.endswith((GZIP, ZSTD)):
        return path
    decompress = _gzip_pieces if path.endswith(GZIP) else _zstd_pieces

    def write(target: Path) -> None:
        with target.open("wb") as out:
            out.writelines(decompress(path))

    return local_copy(path, version_of(path), Path(path).with_suffix("").suffix, cache_dir, write)


def _gzip_pieces(path: str) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") as packed:
            while piece := packed.read(_PIECE):
                yield piece
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, str(error)) from error


def _zstd_pieces(path: str) -> Iterator[bytes]:
    with optional("zstandard", "data", _PATH):
        import zstandard
    frame = None
    try:
        with open(path, "rb") as packed:
            while piece := packed.read(_PIECE):
                # A file that was written in parts has several frames, one after the other.
                while piece:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    yield frame.decompress(piece)
                    piece, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except (OSError, zstandard.ZstdError) as error:
        raise _damaged(path, str(error)) from error
    if frame is not None:
        raise _damaged(path, "it ends in the middle of a frame")


def _damaged(path: str, reason: str) -> ConfigError:
    return ConfigError(Problem(_PATH, f"{path} cannot be unpacked: {reason}"))


def files_in(directory: Path) -> dict[str, object]:
    """Return TensorStore's specification of the files in a directory."""
    # TensorStore refuses a path with `..` in it.
    return {"driver": "file", "path": f"{directory.resolve()}/"}
