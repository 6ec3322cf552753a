"""Step directories by name: `120` is committed, `120.damaged` and `120.abandoned` are set aside.

Orbax writes into `120.orbax-checkpoint-tmp...` and commits by an atomic rename, so that a name made
of digits alone is the commit. Nothing here reads a checkpoint or imports JAX.

`checkpoint.resume`: which step a run continues from."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maxpipe.config.errors import ConfigError, Problem

COMMITTED = "committed"
DAMAGED = "damaged"
ABANDONED = "abandoned"
UNFINISHED = "unfinished"

_COMMITTED_NAME = re.compile(r"0|[1-9]\d*")
_ASIDE_NAME = re.compile(rf"(\d+)\.({DAMAGED}|{ABANDONED})(-\d+)?")
_UNFINISHED_NAME = re.compile(r"(\d+)\.orbax-checkpoint-tmp.*")


@dataclass(frozen=True)
class StepDirectory:
    """A directory that holds, held or was to hold the checkpoint of `step`."""

    step: int
    state: str
    path: Path

    @property
    def name(self) -> str:
        """As it is listed."""
        return self.path.name


def checkpoints_of(path: Path) -> Path:
    """The directory that holds the steps of a run, from that of the run or itself."""
    inner = path / "checkpoints"
    return inner if inner.is_dir() else path


def step_path(directory: Path, step: int) -> Path:
    """Where the committed checkpoint of `step` lies."""
    return directory / str(step)


def step_directories(directory: Path) -> list[StepDirectory]:
    """Every step directory in `directory` whatever its state, by step, then name; the rest is left out."""
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if not path.is_dir():
            continue
        if _COMMITTED_NAME.fullmatch(path.name):
            found.append(StepDirectory(int(path.name), COMMITTED, path))
        elif match := _ASIDE_NAME.fullmatch(path.name):
            found.append(StepDirectory(int(match[1]), match[2], path))
        elif match := _UNFINISHED_NAME.fullmatch(path.name):
            found.append(StepDirectory(int(match[1]), UNFINISHED, path))
    return sorted(found, key=lambda entry: (entry.step, entry.path.name))


def committed_steps(directory: Path) -> list[int]:
    """Committed steps in ascending order; empty if the directory does not exist."""
    return [entry.step for entry in step_directories(directory) if entry.state == COMMITTED]


def set_aside(directory: Path, step: int, state: str) -> Path:
    """Renames a committed step, so that it is not restored, counted or deleted; returns its new path.

    Renaming it back to the bare number undoes this.
    """
    assert state in (DAMAGED, ABANDONED)
    names = itertools.chain(
        [f"{step}.{state}"], (f"{step}.{state}-{n}" for n in itertools.count(2))
    )
    target = next(path for path in (directory / name for name in names) if not path.exists())
    return step_path(directory, step).rename(target)


KEY = "checkpoint.resume"


def choose(resume: str, steps: Sequence[int], place: str = "") -> int | None:
    """The step to continue from, or None to start from initial values.

    `auto` takes the newest step if there is one, `must` insists on one, a number takes exactly that
    step. `never` is refused while committed steps exist: going on would mix two runs under one
    name, and clearing them would destroy work on the strength of one word.

    Args:
      resume: value of `checkpoint.resume`.
      steps: committed steps in any order.
      place: where they lie; named in messages.

    Raises:
      ConfigError: the value is not one of these, or `steps` does not allow it; names
        `checkpoint.resume`.
    """
    where = f" in {place}" if place else ""
    there = f"committed steps{where}: {', '.join(map(str, sorted(steps))) or 'none'}"
    if resume == "auto":
        return max(steps, default=None)
    if resume == "never":
        if steps:
            raise _refusal(
                f"never, but there is something ({there}); delete it or choose another run_name"
            )
        return None
    if resume == "must":
        if not steps:
            raise _refusal(
                f"must, but there is nothing to resume ({there}); check output_dir and run_name"
            )
        return max(steps)
    if not (resume.isascii() and resume.isdecimal()):
        raise _refusal(f"{resume!r} is not auto, never, must or the number of a step")
    if int(resume) not in steps:
        raise _refusal(f"step {int(resume)} does not exist ({there})")
    return int(resume)


def _refusal(message: str) -> ConfigError:
    return ConfigError(Problem(KEY, message))
