"""The source text of the running Python's standard library: real text, on every machine, megabytes of it."""

import os
import sysconfig
from pathlib import Path

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import DataConfig
from maxpipe.data.files import FileDocuments

# Tests hold files that are broken on purpose, and the others are not part of the standard library.
SKIPPED_DIRECTORIES = {
    "__pycache__",
    "idle_test",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
}


def build(config: DataConfig) -> FileDocuments:
    """One document per module, in order of path; `data.path` is not used.

    Raises:
      ConfigError: this Python comes without the source of its library.
    """
    root = sysconfig.get_path("stdlib")
    paths = []
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED_DIRECTORIES]
        paths += [Path(directory, name) for name in files if name.endswith(".py")]
    # Compared by parts and relative to the root, the order is the same wherever Python is
    # installed.
    paths.sort(key=lambda path: path.relative_to(root).parts)
    paths = [path for path in paths if path.stat().st_size]
    if not paths:
        raise ConfigError(
            Problem("data.source", f"no Python source under {root}; choose another source")
        )
    return FileDocuments([str(path) for path in paths])
