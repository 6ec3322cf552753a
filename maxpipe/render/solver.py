"""Parse `solve` with its `key=value` words, search for the best schedule and print it."""

import sys
from collections.abc import Sequence
from typing import TextIO

from maxpipe.config.imports import install_command, is_installed
from maxpipe.plan.solve import Solution, Task, solve
from maxpipe.render.request import (
    OTHER_COSTS,
    SIZES,
    UNIT_COSTS,
    Collector,
    UsageError,
    check_cells,
    chunk_costs,
    is_refused,
    parse_costs,
    parse_number,
    parse_pairs,
    parse_sizes,
    parse_switch,
)
from maxpipe.render.terminal import comparison_text

COMMAND = "solve"
REPEATS = {"loop": 1, "v": 2}
KEYS = (
    *SIZES,
    "placement",
    "memory",
    "lockstep",
    *UNIT_COSTS,
    *(key for key in OTHER_COSTS if key != "collectives"),
)
SECONDS_BETWEEN_LINES = 5.0
WITHOUT_SOLVER = (
    f"exact search needs OR-Tools, which is not installed: {install_command('solve')}; "
    "heuristics alone were tried"
)
WITHOUT_TIME = "heuristics took all of the time, and left none for exact search; raise --seconds"


def parse_task(words: Sequence[str]) -> Task:
    """Parse the words after `solve`.

    Raises:
      UsageError: words are not keys with legal values; with all such words.
    """
    collector = Collector()
    for word in words:
        if "=" not in word:
            collector.refuse(f"{word}: solve takes no schedule, only keys: {', '.join(KEYS)}")
    pairs = parse_pairs(words, KEYS, "solve has", collector)
    placement = pairs.get("placement", "loop")
    if placement not in REPEATS:
        collector.refuse(f"placement={placement}: must be loop or v")
    sizes = parse_sizes(pairs, collector)
    defaults = {**SIZES, "repeats": REPEATS.get(placement, 1)}
    stages, microbatches, repeats = (defaults | sizes).values()
    costs = parse_costs(pairs, collector)
    is_small = collector.attempt(False, check_cells, stages, microbatches, repeats)
    if is_small and not is_refused("stages", pairs, sizes):
        costs = collector.attempt(costs, chunk_costs, costs, stages, repeats)
    lockstep = None
    if "lockstep" in pairs:
        lockstep = collector.attempt(None, parse_switch, "lockstep", pairs["lockstep"])
    in_flight = collector.attempt(1, _max_in_flight, pairs, microbatches, repeats)
    collector.check()
    return Task(
        stages,
        microbatches,
        repeats,
        placement,
        lockstep,
        in_flight,
        costs,
    )


def _max_in_flight(pairs: dict[str, str], microbatches: int, repeats: int) -> int:
    """Return the chunks that may be in flight on a stage."""
    if "memory" not in pairs:
        return microbatches * repeats
    chunks = int(parse_number("memory", pairs["memory"]) * repeats + 1e-9)
    if chunks < repeats:
        raise UsageError(
            f"memory={pairs['memory']}: must be at least 1, since a stage holds all its chunks of "
            "a microbatch until the first backward"
        )
    return min(chunks, microbatches * repeats)


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
        """Show the state after some seconds."""
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
        """End the line."""
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
