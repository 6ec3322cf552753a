"""Find the files that `data.path` names, and check what sources ask of them."""

import glob
import os
from collections.abc import Callable, Sequence
from os.path import isdir, isfile
from pathlib import Path
from stat import S_ISREG
from typing import TypeVar

import numpy as np

from maxpipe.config.catalog import PACKED, SOURCES, DataSource
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.model_places import SCHEME
from maxpipe.config.sections import DataConfig
from maxpipe.storage.local_files import (
    RemoteFile,
    each_once,
    fetch,
    list_remote,
    local_file,
    shown,
    with_endings,
)
from maxpipe.storage.object_store import is_remote

_ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar", ".lz4", ".br", *(f".tar{e}" for e in PACKED))
ErrorT = TypeVar("ErrorT", bound=ConfigError)
_BLOCK = 1 << 24  # elements compared at a time, so that the temporary is small next to the file


def path_error(message: str) -> ConfigError:
    """Return an error about what `data.path` names."""
    return ConfigError(Problem("data.path", message))


def reworded(error: ErrorT, change: Callable[[Problem], Problem]) -> ErrorT:
    """Return an error of the same kind, each of its problems changed."""
    return type(error)(*map(change, error.problems))


def find_files(
    path: str, suffixes: Sequence[str] = ("",), cache_dir: str = "", limit: int = 0
) -> list[str]:
    """Return the files of `data.path`, a comma-separated list of files, directories and globs, each
    once: local files first, sorted, then copies of remote files in the order of their names.

    A directory stands for all files below it with one of `suffixes`, except hidden ones. Files that
    are named or matched by a glob may have any ending, unless their contents are packed in a way
    that the source cannot read. Raises ConfigError if `path` is empty, or one of its parts matches
    no file, or one that is packed.
    """
    local: set[str] = set()
    copies: dict[str, None] = {}  # an ordered set
    problems = []
    for part in parts_of(path):
        if is_remote(part):
            files = fetch(part, suffixes, cache_dir, limit)
            copies.update(dict.fromkeys(files))
        else:
            files = local_files(part, suffixes)
            local.update(files)
        if not files:
            holds = shown(suffixes)
            message = f"no file at {part!r}; give a file, a glob, or a directory that holds {holds}"
            if "," in path:
                message += "; commas separate several paths"
            problems.append(Problem("data.path", message))
    reads_packed = any(suffix.endswith(PACKED) for suffix in suffixes)
    unreadable = _ARCHIVES if reads_packed else (*_ARCHIVES, *PACKED)
    for file in [*local, *copies]:
        # A user's own source that names no endings may read anything.
        if any(suffixes) and file.lower().endswith(unreadable):
            message = f"{file} is packed in a way that this data.source does not read; unpack it"
            problems.append(Problem("data.path", message))
    if problems:
        raise ConfigError(*problems)
    if not local and not copies:
        raise path_error("this data.source needs a file, a directory or a glob here")
    return [*each_once(local), *copies]


def files_of(config: DataConfig, source: str, may_be_empty: bool = False) -> list[str]:
    """Return the files of `data.path` for a source; none is empty, unless they `may_be_empty`."""
    facts = SOURCES[source]
    if facts.companion and is_remote(config.path):
        # A copy has another name, so it would lose its index and with it the ends of documents.
        raise path_error("token files must be on this machine; copy them with their indices")
    path = full_names(config.path, facts)
    files = find_files(path, facts.suffixes, config.cache_dir, config.cache_limit)
    return files if may_be_empty else require_content(files)


def full_names(path: str, facts: DataSource) -> str:
    """Return `data.path` with PREFIX or its companion, but no directory, as the file of PREFIX."""
    if not facts.by_prefix:
        return path
    (ending,) = facts.suffixes
    names = []
    for part in parts_of(path):
        name = part.removesuffix(ending).removesuffix(facts.companion) + ending
        is_directory = isdir(os.path.expanduser(part)) and not isfile(os.path.expanduser(name))
        names.append(part if is_directory else name)
    return ",".join(names)


def stored_files(path: str, suffixes: Sequence[str]) -> list[RemoteFile]:
    """Return the files of `data.path` where they lie, local ones first; errors are those of
    `find_files` and `list_remote`.
    """
    remote, local = (
        [p for p in parts_of(path) if is_remote(p) == there] for there in (True, False)
    )
    files = [file for url in remote for file in list_remote(url, suffixes)]
    if local or not files:
        files = [*map(local_file, find_files(",".join(local), suffixes)), *files]
    return files


def parts_of(path: str) -> list[str]:
    """Return the files, directories, globs and URLs that `data.path` lists."""
    return [part for part in (part.strip() for part in path.split(",")) if part]


def sorted_parts(path: str) -> list[str]:
    """Return the entries of `data.path` once each, sorted, data sets of the hub last."""
    return sorted(set(parts_of(path)), key=lambda part: (part.startswith(SCHEME), part))


def local_files(part: str, suffixes: Sequence[str]) -> list[str]:
    """Return the files of one entry of `data.path` on this machine; empty if there are none.

    Raises ConfigError if part of the data would be missing, because a directory cannot be read or a
    file is a link without a target.
    """
    path = Path(part).expanduser()
    if isfile(path):  # unlike `Path.is_file`, false also for names that are too long
        return [str(path)]
    if isdir(path):
        names = with_endings(_names_below(str(path)), suffixes, str(path))
    else:
        names = with_endings(glob.glob(str(path), recursive=True), ("", *PACKED), part)
    return [name for name in names if _is_file(name)]


def _names_below(directory: str) -> list[str]:
    """Return what is below a directory and not hidden, without its directories."""
    names: list[str] = []
    seen: set[str] = set()
    tops = [directory]
    for top in tops:  # links to directories are appended, so that those in the tree come first
        for parent, directories, files in os.walk(top, onerror=_refuse_directory):
            real = os.path.realpath(parent)
            directories[:] = sorted(name for name in directories if not name.startswith("."))
            if real in seen:
                directories.clear()
                continue
            seen.add(real)
            names += [os.path.join(parent, name) for name in files if not name.startswith(".")]
            tops += filter(os.path.islink, (os.path.join(parent, name) for name in directories))
    return names


def _refuse_directory(error: OSError) -> None:
    if Path(error.filename).name != "lost+found":  # of a file system's root; only root may read it
        raise path_error(f"{error.filename} cannot be read: {error.strerror}") from error


def _is_file(name: str) -> bool:
    try:
        return S_ISREG(os.stat(name).st_mode)
    except OSError as error:  # also of a link to nothing
        raise path_error(f"{name} cannot be read: {error.strerror}") from error


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
