"""The files that `data.path` names, and documents that are files or stretches of files."""

import glob
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.storage.local_files import fetch
from maxpipe.storage.object_store import is_remote

_BLOCK = 1 << 24  # elements compared at a time, so that the temporary is small next to the file


class BadDocument(ConfigError):
    """A document that is neither text nor token ids, whenever it is read.

    `data.on_bad_document=skip` leaves it out. An error of reading, which may pass, is not of this
    kind: leaving out what another start can read would change the batches.
    """


def find_files(path: str, suffixes: Sequence[str] = ("",), cache_dir: str = "") -> list[str]:
    """Return the files of a comma-separated list of files, directories and globs, each once.

    Local files come first, sorted, then copies of remote files in the order of their names.

    Args:
      path: value of `data.path`. A directory stands for all files below it except hidden ones.
      suffixes: endings that a file in a directory must have; files that are named or matched by a
        glob may have any.
      cache_dir: `data.cache_dir`, which holds the copies of remote files.

    Raises:
      ConfigError: `path` is empty, or one of its parts matches no file.
    """
    local: set[str] = set()
    copies: dict[str, None] = {}  # an ordered set
    problems = []
    for part in parts_of(path):
        if is_remote(part):
            files = fetch(part, suffixes, cache_dir)
            copies.update(dict.fromkeys(files))
        else:
            files = local_files(part, suffixes)
            local.update(files)
        if not files:
            endings = " or ".join(f"*{suffix}" for suffix in suffixes)
            message = (
                f"no file at {part!r}; give a file, a glob, or a directory that holds {endings}"
            )
            problems.append(Problem("data.path", message))
    if problems:
        raise ConfigError(*problems)
    if not local and not copies:
        message = "this data.source needs a file, a directory or a glob here"
        raise ConfigError(Problem("data.path", message))
    return [*sorted(local), *copies]


def parts_of(path: str) -> list[str]:
    """Return the files, directories, globs and URLs that `data.path` lists."""
    return [part for part in (part.strip() for part in path.split(",")) if part]


def local_files(part: str, suffixes: Sequence[str]) -> list[str]:
    """Return the files of one entry of `data.path` on this machine; empty if there are none."""
    path = Path(part).expanduser()
    if path.is_file():
        return [str(path)]
    is_directory = path.is_dir()
    pattern = glob.escape(str(path)) + "/**/*" if is_directory else str(path)
    files = [name for name in glob.glob(pattern, recursive=True) if Path(name).is_file()]
    return [name for name in files if name.endswith(tuple(suffixes))] if is_directory else files


def require_content(paths: list[str]) -> list[str]:
    """Return `paths`; raise ConfigError naming empty files, which broken downloads leave."""
    empty = [path for path in paths if not Path(path).stat().st_size]
    if empty:
        raise ConfigError(*(Problem("data.path", f"{path} is empty") for path in empty))
    return paths


def find_all(array: np.ndarray, value: int) -> np.ndarray:
    """Return the ascending positions of `value` in a 1-D, possibly memory-mapped array, int64."""
    blocks = range(0, len(array), _BLOCK)
    return np.concatenate(
        [np.flatnonzero(array[start : start + _BLOCK] == value) + start for start in blocks]
    )


def read_text(path: str, start: int = 0, end: int | None = None) -> str:
    """Return bytes `start` to `end` of a file as text whose lines all end with a newline.

    Raises:
      BadDocument: they are not UTF-8; names file and byte.
      ConfigError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            file.seek(start)
            text = file.read(-1 if end is None else end - start).decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"{path} is not UTF-8 text: byte {start + error.start}"
        raise BadDocument(Problem("data.path", message)) from error
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}"
        raise ConfigError(Problem("data.path", message)) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


class FileDocuments:
    """One document per UTF-8 text file, read when it is asked for."""

    def __init__(self, paths: Sequence[str]):
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> str:
        """Return the text of a file; raises as `read_text`."""
        return read_text(self._paths[index])


class Spans:
    """The positions of documents that are stretches of files.

    Args:
      spans: start and end of each document, int64 [documents, 2], for each file.
    """

    def __init__(self, spans: Sequence[np.ndarray]):
        self._spans = spans
        self._firsts = np.array([0, *accumulate(len(span) for span in spans)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def locate(self, index: int) -> tuple[int, int, int]:
        """Return the number of the file that holds document `index`, and start and end in it."""
        file = int(np.searchsorted(self._firsts, index, side="right")) - 1
        start, end = self._spans[file][index - self._firsts[file]]
        return file, int(start), int(end)
