"""The files that `data.path` names, and documents that are whole files."""

import glob
from collections.abc import Sequence
from pathlib import Path

from maxpipe.config.errors import ConfigError, Problem


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


def find_files(path: str, suffixes: Sequence[str] = ("",)) -> list[str]:
    """The files of a comma-separated list of files, directories and globs; sorted, each once.

    Args:
      path: value of `data.path`. A directory stands for all files beneath it, hidden ones left out.
      suffixes: endings that a file in a directory must have; files named or matched by a glob may have any.

    Raises:
      ConfigError: `path` is empty, or one of its parts gives no file.
    """
    found: set[str] = set()
    problems = []
    for part in filter(None, (part.strip() for part in path.split(","))):
        files = _expand(Path(part).expanduser(), suffixes)
        found.update(files)
        if not files:
            message = f"no file at {part!r}; give a file, a directory or a glob such as 'text/**/*.txt'"
            problems.append(Problem("data.path", message))
    if problems:
        raise ConfigError(*problems)
    if not found:
        raise ConfigError(Problem("data.path", "this data.source needs a file, a directory or a glob here"))
    return sorted(found)


def _expand(path: Path, suffixes: Sequence[str]) -> list[str]:
    if path.is_file():
        return [str(path)]
    pattern = glob.escape(str(path)) + "/**/*" if path.is_dir() else str(path)
    files = [name for name in glob.glob(pattern, recursive=True) if Path(name).is_file()]
    return [name for name in files if name.endswith(tuple(suffixes))] if path.is_dir() else files
