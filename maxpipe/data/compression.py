"""Compressed files by their endings, unpacked once."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.data.local_copy import local_copy, version_of
from maxpipe.optional import optional

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
