"""Read `solve` with its `key=value` words, search for the best schedule and print it."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import install_command, is_installed
from maxpipe.config.sections.fields import option
from maxpipe.plan.solve import Solution, Task, solve
from maxpipe.render.schedule_request import (
    Keys,
    chunk_costs,
    read_keys,
    size_problems,
    time_problems,
)
from maxpipe.render.schedule_text import comparison_text

REPEATS = {"loop": 1, "v": 2}
SECONDS_BETWEEN_LINES = 5.0
WITHOUT_SOLVER = (
    f"exact search needs OR-Tools, which is not installed: {install_command('solve')}; "
    "heuristics alone were tried"
)
WITHOUT_TIME = "heuristics took all of the time, and left none for exact search; raise --seconds"


@dataclass(frozen=True)
class SolveKeys(Keys):
    """Keys of `solve`."""

    memory: float = option(
        math.inf,
        "most microbatches in flight on a stage; a chunk counts 1/repeats",
        minimum=1,
    )
    placement: str = option("loop", "loop has 1 repeat, v 2, unless given", choices=(*REPEATS,))
    lockstep: str = option(
        "auto",
        "true: for the scheduled engine; false: for mpmd; auto: whichever is faster",
        choices=("auto", "true", "false"),
    )


def read_task(words: Sequence[str], problems: Sequence[Problem] = ()) -> Task:
    """Read the words after `solve`.

    Args:
      words: `key=value` words.
      problems: what is wrong with the command line besides.

    Raises:
      ConfigError: with these problems and those of the words.
    """
    found = [*problems]
    for word in words:
        if "=" not in word:
            found.append(Problem("", f"{word}: solve takes no schedule, only keys"))
    values, wrong = read_keys(SolveKeys, [word for word in words if "=" in word])
    found += wrong
    keys = SolveKeys(**{"repeats": REPEATS[values.get("placement", "loop")]} | values)
    found += size_problems(keys)
    if not any(problem.key == "stages" for problem in found):
        found += time_problems(keys)
    if found:
        raise ConfigError(*found)
    chunks = keys.microbatches * keys.repeats
    return Task(
        keys.stages,
        keys.microbatches,
        keys.repeats,
        keys.placement,
        {"true": True, "false": False, "auto": None}[keys.lockstep],
        int(min(keys.memory * keys.repeats + 1e-9, chunks)),
        chunk_costs(keys.costs(), keys.stages, keys.repeats),
    )


class ProgressLine:
    """Show the best makespan and the bound: one line that changes, or lines now and then in a file.

    Args:
      stream: where to write.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = -SECONDS_BETWEEN_LINES
        self._width = 0

    def __call__(self, seconds: float, makespan: float, bound: float) -> None:
        if not self._stream.isatty() and seconds < self._shown + SECONDS_BETWEEN_LINES:
            return
        self._shown = seconds
        line = f"{seconds:.0f} s: best makespan {makespan:.6g}, bound {bound:.6g}"
        if self._stream.isatty():
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._width:
            self._stream.write("\n")


def search(task: Task, seconds: float) -> Solution:
    """Solve a task with a progress line on stderr."""
    line = ProgressLine(sys.stderr)
    solution = solve(task, seconds, line)
    line.close()
    if not solution.exact and seconds > 0:
        print(WITHOUT_TIME if is_installed("ortools") else WITHOUT_SOLVER, file=sys.stderr)
    return solution


def solution_text(solution: Solution) -> str:
    """Return a line for the schedule and for each named one that fits, and what was proved."""
    run = solution.run
    above = run.makespan / solution.bound - 1 if solution.bound > 0 else 0.0
    verdict = "no order is shorter" if solution.is_optimal else f"found: {above:.2%} above it"
    return (
        f"{comparison_text([run, *solution.named])}"
        f"bound: no {solution.forms} order of these sizes takes less than {solution.bound:.6g}; "
        f"{verdict}\n"
    )
