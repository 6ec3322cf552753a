"""Find the files that `data.path` names, and check what sources ask of them."""

import glob
from collections.abc import Sequence
from os.path import isdir, isfile
from pathlib import Path

import numpy as np

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.model_places import SCHEME
from maxpipe.storage.local_files import fetch
from maxpipe.storage.object_store import is_remote

_BLOCK = 1 << 24  # elements compared at a time, so that the temporary is small next to the file


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
            endings = " or ".join(f"*{suffix}" for suffix in suffixes if suffix) or "files"
            message = (
                f"no file at {part!r}; give a file, a glob, or a directory that holds {endings}"
            )
            if "," in path:
                message += "; commas separate several paths"
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


def sorted_parts(path: str) -> list[str]:
    """Return the entries of `data.path` once each, sorted, data sets of the hub last."""
    return sorted(set(parts_of(path)), key=lambda part: (part.startswith(SCHEME), part))


def local_files(part: str, suffixes: Sequence[str]) -> list[str]:
    """Return the files of one entry of `data.path` on this machine; empty if there are none.

    Raises:
      ConfigError: a file is a link without a target, so part of the data would be missing.
    """
    path = Path(part).expanduser()
    if isfile(path):  # unlike `Path.is_file`, false also for names that are too long
        return [str(path)]
    is_directory = isdir(path)
    pattern = glob.escape(str(path)) + "/**/*" if is_directory else str(path)
    endings = tuple(suffixes) if is_directory else ("",)
    matches = [name for name in glob.glob(pattern, recursive=True) if name.endswith(endings)]
    if broken := next((name for name in matches if not Path(name).exists()), None):
        message = f"{broken} is a link to nothing; mount what it links to, or remove it"
        raise ConfigError(Problem("data.path", message))
    return [name for name in matches if Path(name).is_file()]


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
