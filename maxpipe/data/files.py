"""The files that `data.path` names, and documents that are whole files."""

import glob
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.data.remote import fetch
from maxpipe.object_store import is_remote

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
            raise ConfigError(Problem("data.path", f"{path} cannot be read: {error.strerror}")) from error


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
      suffixes: endings that a file in a directory must have; files named or matched by a glob may have any.
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
            message = f"no file at {part!r}; give a file, a glob, or a directory that holds {endings}"
            problems.append(Problem("data.path", message))
    if problems:
        raise ConfigError(*problems)
    if not found and not fetched:
        raise ConfigError(Problem("data.path", "this data.source needs a file, a directory or a glob here"))
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
    empty = [Problem("data.path", f"{path} is empty") for path in paths if not Path(path).stat().st_size]
    if empty:
        raise ConfigError(*empty)
    return paths
