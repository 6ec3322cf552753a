"""Name a run's steps: `120` is committed, `120.damaged` and `120.abandoned` are set aside.

Orbax writes into `120.orbax-checkpoint-tmp...` and commits by an atomic rename, so a name made of
digits alone is a commit. A mirror (`maxpipe.checkpoint.mirror`) holds steps in an object store and
has the same interface.

`checkpoint.resume` chooses the step that a start continues from. The number of a step, or `never`,
is obeyed once per job, not again in each of its attempts: a run that loses processes faster than it
can get past its newest step would never end. So a start that obeys one marks all checkpoints that
it writes, and a later attempt whose newest step has the mark continues from that step.

Imports no JAX.
"""

import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from maxpipe.checkpoint.errors import CheckpointDamaged
from maxpipe.checkpoint.record import Record, step_record
from maxpipe.config.errors import ConfigError, Problem

CHECKPOINTS = "checkpoints"  # name of the steps' directory within a run's directory

COMMITTED = "committed"
DAMAGED = "damaged"
ABANDONED = "abandoned"
UNFINISHED = "unfinished"

# Names in a supervisor's directory in memory: see `maxpipe.checkpoint.replicas`.
OWN, PARTNER, COPIED = "own", "partner", "copied"

RESUME = "checkpoint.resume"
AUTO = "auto"
NEWEST = (AUTO, "must")  # values that take the newest step
FOLLOWED = "followed"  # in a checkpoint's meta

Job = tuple[str, int]  # name ("" without a job) and number of the attempt

_STATES = {
    COMMITTED: re.compile(r"(0|[1-9]\d*)"),
    **{state: re.compile(rf"(\d+)\.{state}(-\d+)?") for state in (DAMAGED, ABANDONED)},
    UNFINISHED: re.compile(r"(\d+)\.orbax-checkpoint-tmp.*"),
}


class StepEntry(NamedTuple):
    step: int
    name: str  # of the directory, or of the object that gives the step its state
    state: str  # `COMMITTED`, `DAMAGED`, `ABANDONED` or `UNFINISHED`


class StepStore(ABC):
    """A place that holds the steps of one run; `str(store)` is its path or URL."""

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

        Returns the path or URL of the new name.
        """

    @abstractmethod
    def local_copy(self, step: int) -> AbstractContextManager[Path]:
        """Return a context with a directory that holds a committed step."""

    @abstractmethod
    def local_files(self, name: str) -> AbstractContextManager[list[Path]]:
        """Return a context with the files, if any, of a directory of the run, as `tokenizer`."""


class StepsDirectory(StepStore):
    """The `StepStore` of a directory in a file system with atomic renames; it may not exist yet."""

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def entries(self) -> list[StepEntry]:
        paths = self.path.iterdir() if self.path.is_dir() else ()
        names = [path.name for path in paths if path.is_dir()]
        entries = (
            StepEntry(int(match[1]), name, state)
            for state, pattern in _STATES.items()
            for name in names
            if (match := pattern.fullmatch(name))
        )
        return sorted(entries)

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
        names = chain([""], (f"-{number}" for number in count(2)))
        paths = (self.path / f"{step}.{state}{name}" for name in names)
        return str(self.of(step).rename(next(path for path in paths if not path.exists())))

    def local_copy(self, step: int) -> AbstractContextManager[Path]:
        return nullcontext(self.of(step))

    def local_files(self, name: str) -> AbstractContextManager[list[Path]]:
        directory = self.path.parent / name
        paths = directory.iterdir() if directory.is_dir() else ()
        # Directories are of other programs, such as .ipynb_checkpoints; a pipe would never end.
        return nullcontext(sorted(path for path in paths if path.is_file()))

    def of(self, step: int) -> Path:
        return self.path / str(step)

    def scratch(self, step: int, use: str) -> Path:
        """Return a directory that counts as unfinished, and so is deleted after a kill."""
        return self.path / f"{step}.orbax-checkpoint-tmp-{use}"

    def remove(self, step: int) -> None:
        """Remove a committed step in such a way that a kill leaves it whole or unfinished."""
        removed = self.of(step).rename(self.scratch(step, "removed"))
        shutil.rmtree(removed)


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


def step_to_resume(resume: str, steps: Sequence[int], place: str) -> int | None:
    """Return the step to continue from, or None to start from initial values.

    `auto` takes the newest of the committed steps if there is one, `must` requires one, and a
    number takes exactly that step. `never` is refused while there are any: continuing would mix two
    runs under one name, and deleting the steps because of one word would destroy work. Raises
    ConfigError if `steps`, in `place`, do not allow it.
    """
    refusal = ""
    if resume == "never" and steps:
        refusal = "never, but there are committed steps; delete them or choose another run_name"
    elif resume == "must" and not steps:
        refusal = "must, but there is nothing to resume; check output_dir and run_name"
    elif resume.isdecimal() and int(resume) not in steps:
        refusal = f"step {int(resume)} does not exist"
    if refusal:
        existing = ", ".join(map(str, sorted(steps))) or "none"
        raise ConfigError(Problem(RESUME, f"{refusal} (committed steps in {place}: {existing})"))
    return int(resume) if resume.isdecimal() else max(steps, default=None)


def followed(resume: str, job: Job) -> dict[str, dict[str, str | int]]:
    """Return the mark, if any: what a start adds to the meta of its checkpoints."""
    name, attempt = job
    if not name or resume in NEWEST:
        return {}
    return {FOLLOWED: {"resume": resume, "job": name, "attempt": attempt}}


def step_since(
    resume: str, job: Job, steps: Iterable[int], record_of: Callable[[int], Record]
) -> int | None:
    """Return the newest step if an earlier attempt of this job, with this `resume`, has written it.

    Damaged records are skipped, as a restore would skip them; one that is unreadable here is an
    error. `steps` are those that the run could continue from, in any order.
    """
    if not followed(resume, job):
        return None
    for step in sorted(steps, reverse=True):
        try:
            mark = record_of(step).meta.get(FOLLOWED, {})
        except CheckpointDamaged:
            continue
        is_same = mark and (mark["resume"], mark["job"]) == (resume, job[0])
        return step if is_same and mark["attempt"] < job[1] else None
    return None
