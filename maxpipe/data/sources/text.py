"""Text files, one document each: files of the user's, or Python's standard library."""

import os
import sysconfig
from pathlib import Path

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import DataConfig
from maxpipe.data.files import FileDocuments, find_files

# Tests hold files that are broken on purpose; packages are not part of the standard library.
SKIPPED_DIRECTORIES = {
    "__pycache__",
    "idle_test",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
}


def text(config: DataConfig) -> FileDocuments:
    """Return the files of `data.path` in sorted order without empty ones.

    Raises:
      ConfigError: there is no file, or all are empty.
    """
    paths = find_files(config.path, cache_dir=config.cache_dir)
    paths = [path for path in paths if Path(path).stat().st_size]
    if not paths:
        raise ConfigError(Problem("data.path", f"every file at {config.path!r} is empty"))
    return FileDocuments(paths)


def python_stdlib(config: DataConfig) -> FileDocuments:
    """Return one document per module of the running Python's standard library, in order of path.

    This is real text, megabytes of it, on every machine. `data.path` is not used.

    Raises:
      ConfigError: this Python comes without the source of its library.
    """
    root = sysconfig.get_path("stdlib")
    paths = []
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED_DIRECTORIES]
        paths += [Path(directory, name) for name in files if name.endswith(".py")]
    # Sorting by parts relative to the root gives the same order wherever Python is installed.
    paths.sort(key=lambda path: path.relative_to(root).parts)
    paths = [path for path in paths if path.stat().st_size]
    if not paths:
        message = f"no Python source under {root}; choose another source"
        raise ConfigError(Problem("data.source", message))
    return FileDocuments([str(path) for path in paths])
