"""Draw the schedules or the configuration that `maxpipe.schedule` names, or the best schedule."""

import argparse
import math
import sys
import time
from collections.abc import Sequence

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.files import repeated_words
from maxpipe.config.imports import install_command, is_installed
from maxpipe.config.outputs import write_file
from maxpipe.config.shipped import names_config
from maxpipe.config.terminal import terminal_width, wants_colour
from maxpipe.pipeline.schedules.csv_files import to_csv
from maxpipe.pipeline.schedules.table import ScheduleError
from maxpipe.plan.simulate import Simulation
from maxpipe.plan.solve import Solution, Task, solve
from maxpipe.render.chart import chart_svg
from maxpipe.render.schedule_request import in_own_keys, read_task, simulate_words
from maxpipe.render.schedule_text import comparison_text, page_html, render_terminal

SOLVE = "solve"
DEFAULT_SECONDS = 60.0
WITHOUT_SOLVER = (
    f"exact search needs OR-Tools, which is not installed: {install_command('solve')}; "
    "heuristics alone were tried"
)
NO_SEARCH = "is for solve; a schedule that is given needs no search"
WITHOUT_TIME = "heuristics took all of the time, and left none for exact search; raise --seconds"


def draw(arguments: argparse.Namespace) -> None:
    """Print what a command line names, or write it to files.

    Raise ValueError if it is wrong, a schedule cannot be built, or a file cannot be made.
    """
    if arguments.words[:1] == [SOLVE]:
        _solve(arguments)
    elif arguments.words and names_config(arguments.words[0]):
        _draw_configuration(arguments)
    else:
        _draw_schedules(arguments)


def _draw_schedules(arguments: argparse.Namespace) -> None:
    problems = _misplaced(arguments, NO_SEARCH)
    names = [word for word in arguments.words if "=" not in word]
    for option in ("csv", "svg"):
        if getattr(arguments, option) and (arguments.compare or len(names) > 1):
            problems.append(Problem(f"--{option}", "name one schedule; it holds no more"))
    runs, subtitle = simulate_words(arguments.words, arguments.compare, problems)
    for run in runs:
        if run.table.note:
            print(in_own_keys(run.table.note), file=sys.stderr)
    if arguments.compare and not arguments.plan:
        _write_files(arguments, runs, subtitle)
        sys.stdout.write(comparison_text(runs))
    else:
        _show(arguments, runs, subtitle)


def _solve(arguments: argparse.Namespace) -> None:
    problems = _misplaced(arguments, compare="solve compares with named schedules anyway")
    seconds = DEFAULT_SECONDS if arguments.seconds is None else arguments.seconds
    if not 0 <= seconds < math.inf:
        problems.append(Problem("--seconds", f"must be a number, at least 0; got {seconds:g}"))
    task = read_task(arguments.words[1:], problems)
    solution = _search(task, seconds)
    sizes = f"{task.num_stages} stages, {task.num_microbatches} microbatches"
    subtitle = f"{sizes}; times are of a chunk and one microbatch"
    if _show(arguments, [solution.run], subtitle):
        sys.stdout.write("\n")
    sys.stdout.write(_solution_text(solution))


def _draw_configuration(arguments: argparse.Namespace) -> None:
    message = "is for schedules by name; a configuration is compared with uniform stages anyway"
    problems = _misplaced(arguments, NO_SEARCH, message)
    path, *words = arguments.words
    if problems := [*problems, *repeated_words(words)]:
        raise ConfigError(*problems)
    from maxpipe.render.stage_times import draw_configuration  # imports JAX, which is slow

    try:
        runs, text, subtitle = draw_configuration(path, words)
    except ScheduleError as error:
        raise ConfigError(*(Problem("", reason) for reason in error.reasons)) from None
    if _show(arguments, runs, subtitle, runs[:1]):
        sys.stdout.write("\n" + text)


def _search(task: Task, seconds: float) -> Solution:
    begin, best = time.monotonic(), math.inf

    def show(makespan: float) -> None:
        nonlocal best
        if makespan < best * (1 - 1e-9):
            best, elapsed = makespan, time.monotonic() - begin
            print(f"{elapsed:.0f} s: makespan {makespan:.6g}", file=sys.stderr, flush=True)

    solution = solve(task, seconds, show)
    if not solution.exact and seconds > 0:
        print(WITHOUT_TIME if is_installed("ortools") else WITHOUT_SOLVER, file=sys.stderr)
    return solution


def _solution_text(solution: Solution) -> str:
    run = solution.run
    above = run.makespan / solution.bound - 1 if solution.bound > 0 else 0.0
    verdict = "no order is shorter" if solution.is_optimal else f"found: {above:.2%} above it"
    return (
        f"{comparison_text([run, *solution.named])}"
        f"bound: no {solution.forms} order of these sizes takes less than {solution.bound:.6g}; "
        f"{verdict}\n"
    )


def _misplaced(
    arguments: argparse.Namespace, seconds: str = "", compare: str = ""
) -> list[Problem]:
    """Return the problems of flags that are given although they are for other words."""
    flags = {"seconds": seconds, "compare": compare}
    given = {f for f in flags if getattr(arguments, f) not in (None, False)}
    return [Problem(f"--{f}", flags[f]) for f in flags if f in given and flags[f]]


def _show(
    arguments: argparse.Namespace,
    runs: Sequence[Simulation],
    subtitle: str,
    printed: Sequence[Simulation] | None = None,
) -> bool:
    """Write the files that are named; without any, or with --plan, print and return true."""
    _write_files(arguments, runs, subtitle)
    printed = printed or runs
    if arguments.plan:
        from maxpipe.render.stage_times import plans_text  # imports JAX, which is slow

        sys.stdout.write(plans_text(printed))
        return True
    if arguments.csv or arguments.svg or arguments.html:
        return False
    width, colour = terminal_width(sys.stdout) or 120, wants_colour(sys.stdout)
    sys.stdout.write("\n".join(render_terminal(r, colour=colour, width=width) for r in printed))
    return True


def _write_files(arguments: argparse.Namespace, runs: Sequence[Simulation], subtitle: str) -> None:
    for flag, write in (
        ("csv", lambda: to_csv(runs[0].table)),
        ("svg", lambda: chart_svg(runs[0])),
        ("html", lambda: page_html(runs, subtitle)),
    ):
        if path := getattr(arguments, flag):
            write_file(f"--{flag}", path, write())
            print(f"wrote {path}", file=sys.stderr)  # stdout may be the file
