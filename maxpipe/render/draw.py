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
from maxpipe.render.schedule_page import page_html
from maxpipe.render.schedule_request import in_own_keys, read_task, simulate_words
from maxpipe.render.schedule_text import comparison_text, render_terminal

SOLVE = "solve"
DEFAULT_SECONDS = 60.0
WITHOUT_SOLVER = (
    f"exact search needs OR-Tools, which is not installed: {install_command('solve')}; "
    "heuristics alone were tried"
)
WITHOUT_TIME = "heuristics took all of the time, and left none for exact search; raise --seconds"


def draw(arguments: argparse.Namespace) -> None:
    """Print what a command line names, or write it to files.

    Args:
      arguments: words, and the flags csv, svg, html (paths or None), plan, compare and seconds.

    Raises:
      ValueError: the command line is wrong, a schedule cannot be built, or a file cannot be made.
    """
    if arguments.words[:1] == [SOLVE]:
        _solve(arguments)
    elif arguments.words and names_config(arguments.words[0]):
        _draw_configuration(arguments)
    else:
        _draw_schedules(arguments)


def _draw_schedules(arguments: argparse.Namespace) -> None:
    problems = _without_seconds(arguments)
    names = [word for word in arguments.words if "=" not in word]
    for option in ("csv", "svg"):
        if getattr(arguments, option) and (arguments.compare or len(names) > 1):
            problems.append(Problem(f"--{option}", "name one schedule; it holds no more"))
    runs, subtitle = simulate_words(arguments.words, arguments.compare, problems)
    for run in runs:
        if run.table.note:
            print(in_own_keys(run.table.note), file=sys.stderr)
    _write_files(arguments, runs, subtitle)
    if arguments.compare and not arguments.plan:
        sys.stdout.write(comparison_text(runs))
    elif not _names_files(arguments):
        _print(runs, arguments.plan)


def _solve(arguments: argparse.Namespace) -> None:
    problems = []
    if arguments.compare:
        message = "solve compares with named schedules anyway; leave it out"
        problems.append(Problem("--compare", message))
    seconds = DEFAULT_SECONDS if arguments.seconds is None else arguments.seconds
    if not 0 <= seconds < math.inf:
        problems.append(Problem("--seconds", f"must be a number, at least 0; got {seconds:g}"))
    task = read_task(arguments.words[1:], problems)
    solution = _search(task, seconds)
    sizes = f"{task.num_stages} stages, {task.num_microbatches} microbatches"
    _write_files(arguments, [solution.run], f"{sizes}; times are of a chunk and one microbatch")
    if not _names_files(arguments):
        _print([solution.run], arguments.plan)
        sys.stdout.write("\n")
    sys.stdout.write(_solution_text(solution))


def _draw_configuration(arguments: argparse.Namespace) -> None:
    problems = _without_seconds(arguments)
    if arguments.compare:
        message = "is for schedules by name; a configuration is compared with uniform stages anyway"
        problems.append(Problem("--compare", message))
    path, *words = arguments.words
    if problems := [*problems, *repeated_words(words)]:
        raise ConfigError(*problems)
    from maxpipe.render.stage_times import draw_configuration  # imports JAX, which is slow

    try:
        drawing = draw_configuration(path, words)
    except ScheduleError as error:
        raise ConfigError(*(Problem("", reason) for reason in error.reasons)) from None
    _write_files(arguments, drawing.runs, drawing.subtitle)
    if not _names_files(arguments):
        _print(drawing.runs[:1], arguments.plan)
        sys.stdout.write("\n" + drawing.text)


def _search(task: Task, seconds: float) -> Solution:
    """Solve a task; print each better makespan to stderr."""
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
    """Return a line for the schedule and for each named one that fits, and what was proved."""
    run = solution.run
    above = run.makespan / solution.bound - 1 if solution.bound > 0 else 0.0
    verdict = "no order is shorter" if solution.is_optimal else f"found: {above:.2%} above it"
    return (
        f"{comparison_text([run, *solution.named])}"
        f"bound: no {solution.forms} order of these sizes takes less than {solution.bound:.6g}; "
        f"{verdict}\n"
    )


def _without_seconds(arguments: argparse.Namespace) -> list[Problem]:
    if arguments.seconds is None:
        return []
    return [Problem("--seconds", "is for solve; a schedule that is given needs no search")]


def _names_files(arguments: argparse.Namespace) -> bool:
    return bool(arguments.csv or arguments.svg or arguments.html) and not arguments.plan


def _write_files(arguments: argparse.Namespace, runs: Sequence[Simulation], subtitle: str) -> None:
    if arguments.csv:
        _write("--csv", arguments.csv, to_csv(runs[0].table))
    if arguments.svg:
        _write("--svg", arguments.svg, chart_svg(runs[0]))
    if arguments.html:
        _write("--html", arguments.html, page_html(runs, subtitle))


def _write(flag: str, path: str, text: str) -> None:
    write_file(flag, path, text)
    print(f"wrote {path}", file=sys.stderr)  # stdout may be the file


def _print(runs: Sequence[Simulation], plan: bool) -> None:
    if plan:
        from maxpipe.render.stage_times import plans_text  # imports JAX, which is slow

        sys.stdout.write(plans_text(runs))
        return
    width = terminal_width(sys.stdout) or 120
    colour = wants_colour(sys.stdout)
    sys.stdout.write("\n".join(render_terminal(run, colour=colour, width=width) for run in runs))
