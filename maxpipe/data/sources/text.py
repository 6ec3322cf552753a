"""Text files, one document each."""

from pathlib import Path

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import DataConfig
from maxpipe.data.files import FileDocuments, find_files


def build(config: DataConfig) -> FileDocuments:
    """The files of `data.path` in sorted order, empty ones left out.

    Raises:
      ConfigError: there is no file, or all are empty.
    """
    paths = [
        path
        for path in find_files(config.path, cache_dir=config.cache_dir)
        if Path(path).stat().st_size
    ]
    if not paths:
        raise ConfigError(Problem("data.path", f"every file at {config.path!r} is empty"))
    return FileDocuments(paths)
