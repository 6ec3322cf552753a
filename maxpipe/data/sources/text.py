"""Read text: one document per file, per module of Python's library, or per line of JSON."""

import hashlib
import json
import os
import sysconfig
from functools import lru_cache
from itertools import compress
from pathlib import Path

import numpy as np

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import Concatenation, FileDocuments, bad_document, read_text
from maxpipe.data.files import files_of, find_all, find_files, path_error, require_content
from maxpipe.storage.local_files import unpacked, version_of

# Tests hold files that are broken on purpose; packages are not part of the standard library.
SKIPPED_DIRECTORIES = {
    *("__pycache__", "idle_test", "test", "tests"),
    *("site-packages", "dist-packages"),
}

LEAST_PIECE = 4096  # bytes in a piece of a single text file
LEAST_PIECES = 10  # pieces of a file that is partly held out


def text(config: DataConfig) -> "FileDocuments | TextPieces":
    """Return the files of `data.path` in sorted order without empty ones; raises ConfigError if
    there are none.

    A single file is read in pieces, so that part of it can be held out; with data.eval_fraction=0
    and no validation set it is one document.
    """
    cache_dir, limit = config.cache_dir, config.cache_limit
    files = find_files(config.path, SOURCES["text"].suffixes, cache_dir, limit)
    copies = [unpacked(file, cache_dir, limit) for file in files]
    sizes = [Path(path).stat().st_size for path in copies]
    files, copies = ([*compress(paths, sizes)] for paths in (files, copies))
    if not files:
        raise path_error(f"every file at {config.path!r} is empty")
    if len(files) == 1 and (config.eval_fraction or config.eval_path):
        least = 1 if config.eval_path else LEAST_PIECES
        return TextPieces(copies[0], files[0], 16 * config.sequence_length, least)
    return FileDocuments(copies, originals=files)


class TextPieces:
    """The pieces of one UTF-8 text file that is not empty, cut at ends of lines where possible.

    Pieces have `size` bytes, but at least `LEAST_PIECE`, and fewer where a small file is to have
    `least` pieces. `original` is the file that the user knows, of which this may be a copy.
    """

    def __init__(self, path: str, original: str, size: int, least: int):
        version = version_of(path)
        size = min(max(size, LEAST_PIECE), -(-version[0] // least))
        self._path = path
        self._original = original
        self._pieces = _cut(path, *version, size)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> str:
        start, end = self._pieces[index].tolist()
        return read_text(self._path, start, end, self._original)


@lru_cache(maxsize=16)
def _cut(path: str, size: int, mtime_ns: int, piece: int) -> np.ndarray:
    """Return start and end in bytes of each piece, int64 [pieces, 2]."""
    del mtime_ns  # part of the cache's key only
    content = np.memmap(path, np.uint8, mode="r")
    ends = []
    start = 0
    while start < size:
        end = min(start + piece, size)
        if end < size:
            lines = np.flatnonzero(content[start:end] == ord("\n"))
            if lines.size:
                end = start + int(lines[-1]) + 1
            else:  # between characters, of which all bytes but the first begin with 10
                before = end
                while before > start and content[before] & 0xC0 == 0x80:
                    before -= 1
                while before == start and end < size and content[end] & 0xC0 == 0x80:
                    end += 1  # the piece is smaller than its first character
                end = end if before == start else before
        ends.append(end)
        start = end
    return np.stack([np.array([0, *ends[:-1]]), np.array(ends)], axis=1).astype(np.int64)


def python_stdlib(config: DataConfig) -> FileDocuments:
    """Return one document per module of the running Python's standard library, in order of path.

    This is real text, megabytes of it, on every machine, unless Python comes without its source.
    """
    paths = _stdlib_files()
    if not paths:
        message = f"no Python source under {_stdlib()}; choose another source"
        raise ConfigError(Problem("data.source", message))
    files = [str(path) for path in paths]
    return FileDocuments(files, originals=files)


def version_of_stdlib() -> str:
    """Return a digest of the names and sizes of the modules that `python_stdlib` reads."""
    names = [
        f"{path.relative_to(_stdlib()).as_posix()} {path.stat().st_size}"
        for path in _stdlib_files()
    ]
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def stdlib_modules() -> list[Path]:
    """Return the modules that are files at the top of the standard library, in order of name."""
    return [path for path in _stdlib_files() if path.parent == Path(_stdlib())]


def _stdlib() -> str:
    return sysconfig.get_path("stdlib")


def _stdlib_files() -> list[Path]:
    """Return the modules that are not empty, in order of path."""
    root = _stdlib()
    paths = []
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED_DIRECTORIES]
        paths += [Path(directory, name) for name in files if name.endswith(".py")]
    # Sorting by parts relative to the root gives the same order wherever Python is installed.
    paths.sort(key=lambda path: path.relative_to(root).parts)
    return [path for path in paths if path.stat().st_size]


class JsonLines:
    """The lines of a file that is not empty, read one at a time through an index of their bytes;
    `original` is the file that the user knows, of which this may be a copy.
    """

    def __init__(self, path: str, original: str):
        self._path = path
        self._original = original
        self._lines, self._blanks = _index_lines(path, *version_of(path))

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> str:
        """Return the text of a line; raises BadDocument if it is no object with a string under
        "text".
        """
        try:
            text = json.loads(self.read(index))["text"]
            if not isinstance(text, str):
                raise TypeError(f"the text is of type {type(text).__name__}")
            # An escaped lone surrogate is legal JSON that no tokenizer can encode.
            text.encode("utf-8")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise bad_document(
                f'{self.place(index)}: not a JSON object with a string under "text" '
                f"({type(error).__name__}: {error})"
            ) from error
        return text

    def read(self, index: int) -> bytes:
        start, end = self._lines[index].tolist()
        with open(self._path, "rb") as stream:
            stream.seek(start)
            return stream.read(end - start)

    def place(self, index: int) -> str:
        """Return the original file and the number of a line in it, from 1, for messages."""
        num_blank = int(np.searchsorted(self._blanks, self._lines[index][0]))
        return f"{self._original}:{index + num_blank + 1}"


@lru_cache(maxsize=1024)
def _index_lines(path: str, size: int, mtime_ns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return start and end in bytes of each line that is not blank, int64 [lines, 2], and the start
    of each blank one.
    """
    del mtime_ns  # part of the cache's key only
    content = np.memmap(path, np.uint8, mode="r")
    ends = np.append(find_all(content, ord("\n")), size)
    starts = np.append(0, ends[:-1] + 1)
    blank = ends == starts
    filled = np.flatnonzero(~blank)
    spaced = filled[np.isin(content[starts[filled]], list(b" \t\r"))]
    blank[spaced] = [not content[starts[i] : ends[i]].tobytes().strip() for i in spaced]
    return np.stack([starts, ends], axis=1)[~blank], starts[blank]


def jsonl(config: DataConfig) -> Concatenation:
    """Return the lines of the files of `data.path`, files in sorted order.

    In a directory these are *.jsonl and *.ndjson, also packed, and packed *.json. Raises
    ConfigError if there is none, or one holds no lines or is damaged.
    """
    return Concatenation([lines_of(file, config) for file in files_of(config, "jsonl")])


def lines_of(file: str, config: DataConfig) -> JsonLines:
    """Return the lines of a file, which may be packed; raises ConfigError if it holds none."""
    (copy,) = require_content([unpacked(file, config.cache_dir, config.cache_limit)])
    return JsonLines(copy, original=file)
