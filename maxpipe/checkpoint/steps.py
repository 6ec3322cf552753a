"""Name a run's steps: `120` is committed, `120.damaged` and `120.abandoned` are set aside.

Orbax writes into `120.orbax-checkpoint-tmp...` and commits by an atomic rename, so a name made of
digits alone is a commit. A mirror (`maxpipe.checkpoint.mirror`) holds steps in an object store and
has the same interface. Imports no JAX.
"""

import itertools
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from maxpipe.checkpoint.record import Record, step_record

CHECKPOINTS = "checkpoints"  # name of the steps' directory within a run's directory

COMMITTED = "committed"
DAMAGED = "damaged"
ABANDONED = "abandoned"
UNFINISHED = "unfinished"

# Names in a supervisor's directory in memory: see `maxpipe.checkpoint.replicas`.
OWN, PARTNER, COPIED = "own", "partner", "copied"

_COMMITTED_NAME = re.compile(r"0|[1-9]\d*")
_ASIDE_NAME = re.compile(rf"(\d+)\.({DAMAGED}|{ABANDONED})(-\d+)?")
_UNFINISHED_NAME = re.compile(r"(\d+)\.orbax-checkpoint-tmp.*")


class StepEntry(NamedTuple):
    """A step and its state."""

    step: int
    state: str  # `COMMITTED`, `DAMAGED`, `ABANDONED` or `UNFINISHED`
    name: str  # of the directory, or of the object that gives the step this state


class StepStore(ABC):
    """A place that holds the steps of one run: a `StepsDirectory` or a `Mirror`.

    `str(store)` is its path or URL.
    """

    @abstractmethod
    def entries(self) -> list[StepEntry]:
        """Return every step whatever its state, by step, then name."""

    def steps(self) -> list[int]:
        """Return committed steps in ascending order."""
        return [entry.step for entry in self.entries() if entry.state == COMMITTED]

    @abstractmethod
    def sizes_and_times(self) -> Iterator[tuple[StepEntry, int, datetime]]:
        """Yield every entry with its size in bytes and the time at which it got its state."""

    @abstractmethod
    def record(self, step: int) -> Record:
        """Return the record of a committed step; raises as `step_record`."""

    @abstractmethod
    def set_aside(self, step: int, state: str) -> str:
        """Rename a committed step, so that it is not restored, counted or deleted.

        Returns the path or URL of the new name. Restoring the old name undoes this.
        """

    @abstractmethod
    def local_copy(self, step: int) -> AbstractContextManager[Path]:
        """Return a context with a directory that holds a committed step."""

    @abstractmethod
    def local_files(self, name: str) -> AbstractContextManager[list[Path]]:
        """Return a context with the files of a directory of the run, such as `tokenizer`.

        The list is empty if there is no such directory.
        """


class StepsDirectory(StepStore):
    """The `StepStore` of a directory in a file system with atomic renames; it may not exist yet."""

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def entries(self) -> list[StepEntry]:
        names = []
        if self.path.is_dir():
            names = [path.name for path in self.path.iterdir() if path.is_dir()]
        entries = [entry for name in names if (entry := _parse(name)) is not None]
        return sorted(entries, key=lambda entry: (entry.step, entry.name))

    def sizes_and_times(self) -> Iterator[tuple[StepEntry, int, datetime]]:
        for entry in self.entries():
            directory = self.path / entry.name
            try:
                size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
                time = datetime.fromtimestamp(directory.stat().st_mtime)
            except FileNotFoundError:
                continue  # a running training has just committed or deleted it
            yield entry, size, time

    def record(self, step: int) -> Record:
        return step_record(self.of(step))

    def set_aside(self, step: int, state: str) -> str:
        assert state in (DAMAGED, ABANDONED)
        name = f"{step}.{state}"
        for number in itertools.count(2):
            if not (self.path / name).exists():
                break
            name = f"{step}.{state}-{number}"
        return str(self.of(step).rename(self.path / name))

    def local_copy(self, step: int) -> AbstractContextManager[Path]:
        return nullcontext(self.of(step))

    def local_files(self, name: str) -> AbstractContextManager[list[Path]]:
        directory = self.path.parent / name
        paths = directory.iterdir() if directory.is_dir() else ()
        # Directories are of other programs, such as .ipynb_checkpoints; a pipe would never end.
        return nullcontext(sorted(path for path in paths if path.is_file()))

    def of(self, step: int) -> Path:
        """Return the path of a committed step."""
        return step_path(self.path, step)


def step_path(directory: Path, step: int) -> Path:
    """Return the path of the committed checkpoint of `step`."""
    return directory / str(step)


def remove_step(path: Path) -> None:
    """Remove a step's directory in such a way that no reader takes a part of it for the whole."""
    removed = path.with_name(f"{path.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    with suppress(OSError):
        path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def committed_steps(directory: Path) -> list[int]:
    """Return committed steps in ascending order; none if the directory does not exist."""
    return StepsDirectory(directory).steps()


def _parse(name: str) -> StepEntry | None:
    if _COMMITTED_NAME.fullmatch(name):
        return StepEntry(int(name), COMMITTED, name)
    if match := _ASIDE_NAME.fullmatch(name):
        return StepEntry(int(match[1]), match[2], name)
    if match := _UNFINISHED_NAME.fullmatch(name):
        return StepEntry(int(match[1]), UNFINISHED, name)
    return None
