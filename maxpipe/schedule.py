"""Show what a pipeline schedule costs, before anything is compiled, or search for the best one.

python -m maxpipe.schedule lockstep_1f1b stages=4 microbatches=8 repeats=2
python -m maxpipe.schedule my_schedule.csv --svg my_schedule.svg
python -m maxpipe.schedule lockstep_1f1b circular zb_h2 stages=8 --html compared.html
python -m maxpipe.schedule --compare stages=8 microbatches=32 repeats=4 backward=2.2 comm=0.05
python -m maxpipe.schedule solve stages=4 microbatches=8 memory=5 input_gradient=1.4 --csv best.csv
python -m maxpipe.schedule CONFIG.yml pipeline.schedule=1f1b pipeline.layers_per_stage=auto
"""

if __name__ == "__main__":
    from maxpipe import ctrl_c

    ctrl_c.expect()

import argparse
import math
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from maxpipe.api import schedules
from maxpipe.config.catalog import SCHEDULES
from maxpipe.config.cli import check_flags, print_problems
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.files import repeated_words
from maxpipe.config.imports import add_import_flag, import_variants
from maxpipe.config.outputs import is_device, output_problems, write_file
from maxpipe.config.rules.layout import is_csv
from maxpipe.config.shipped import names_config
from maxpipe.config.terminal import no_tracebacks, terminal_width, wants_colour
from maxpipe.pipeline.schedules.csv_files import to_csv
from maxpipe.pipeline.schedules.table import ScheduleError
from maxpipe.plan.simulate import Simulation
from maxpipe.render.chart import chart_svg
from maxpipe.render.schedule_page import page_html
from maxpipe.render.schedule_request import (
    ScheduleKeys,
    in_own_keys,
    keys_help,
    problems_of,
    read_request,
    simulate_schedules,
)
from maxpipe.render.schedule_text import comparison_text, render_terminal
from maxpipe.render.solver import SolveKeys, read_task, search, solution_text

SOLVE = "solve"
DEFAULT_SECONDS = 60.0
_OWN_KEYS = keys_help(SolveKeys, besides=ScheduleKeys)
KEYS_HELP = f"""\
keys:
{keys_help(ScheduleKeys)}

Times are of a whole stage, all its chunks, for one microbatch. zb_v and zb_h2 have their published
orders; with any of these times, orders that follow them.
With several schedules, or --compare, those with one chunk per stage run with repeats=1, V schedules
(zb_v, v_half, v_min, dualpipe_v) with repeats=2, and options that a schedule does not have are left
out. Peaks count chunks; --compare counts whole stages instead. The bubble is the idle share of all
stages' time, from a step's first unit to its last.

solve finds the order of least makespan, no worse than any named schedule of its sizes that fits,
and a bound that no order can beat. Besides sizes and times, it takes

{_OWN_KEYS}

Exact search needs OR-Tools: pip install "maxpipe[solve]". Without it, heuristics are tried.

A configuration is drawn with the times that its stages would take by their FLOPs and the memory
that they would need, next to uniform stages if these differ. All its keys can be given. Devices are
those of compile.topology, else as many as the mesh names, where -1 is 1.
"""


class _Schedule(ModuleType):
    """The type of this module: `maxpipe.schedule`, which is also a function for programs."""

    def __call__(self, *names: str, **options: schedules.Value) -> schedules.Schedules:
        """Simulate schedules, see `maxpipe.api.schedules.schedule`."""
        return schedules.schedule(*names, **options)


sys.modules[__name__].__class__ = _Schedule


@no_tracebacks()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, or 2 for a wrong command line or file."""
    try:
        arguments = _arguments(argv)
        _check_files(arguments)
        if arguments.words[:1] == [SOLVE]:
            _solve(arguments)
        elif arguments.words and names_config(arguments.words[0]):
            _draw_configuration(arguments)
        else:
            _draw_schedules(arguments)
    except ConfigError as error:
        print_problems(error)
        return 2
    except ValueError as error:  # a schedule that cannot be built
        print_problems(ConfigError(*problems_of(error)))
        return 2
    return 0


def _draw_schedules(arguments: argparse.Namespace) -> None:
    problems = _without_seconds(arguments)
    names = [word for word in arguments.words if "=" not in word]
    for option in ("csv", "svg"):
        if getattr(arguments, option) and (arguments.compare or len(names) > 1):
            problems.append(Problem(f"--{option}", "name one schedule; it holds no more"))
    request = read_request(arguments.words, arguments.compare, problems)
    runs = simulate_schedules(request)
    for run in runs:
        if run.table.note:
            print(in_own_keys(run.table.note), file=sys.stderr)
    _write_files(arguments, runs, request.subtitle(runs))
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
    solution = search(task, seconds)
    sizes = f"{task.num_stages} stages, {task.num_microbatches} microbatches"
    _write_files(arguments, [solution.run], f"{sizes}; times are of a chunk and one microbatch")
    if not _names_files(arguments):
        _print([solution.run], arguments.plan)
        sys.stdout.write("\n")
    sys.stdout.write(solution_text(solution))


def _draw_configuration(arguments: argparse.Namespace) -> None:
    problems = _without_seconds(arguments)
    if arguments.compare:
        message = "is for schedules by name; a configuration is compared with uniform stages anyway"
        problems.append(Problem("--compare", message))
    path, *words = arguments.words
    if problems := [*problems, *repeated_words(words)]:
        raise ConfigError(*problems)
    try:
        drawing = _with_jax().draw_configuration(path, words)
    except ScheduleError as error:
        raise ConfigError(*(Problem("", reason) for reason in error.reasons)) from None
    _write_files(arguments, drawing.runs, drawing.subtitle)
    if not _names_files(arguments):
        _print(drawing.runs[:1], arguments.plan)
        sys.stdout.write("\n" + drawing.text)


def _with_jax() -> ModuleType:
    # Drawing schedules by name needs no JAX, which is slow to import.
    import maxpipe.render.stage_times as module

    return module


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
        sys.stdout.write(_with_jax().plans_text(runs))
        return
    width = terminal_width(sys.stdout) or 120
    colour = wants_colour(sys.stdout)
    sys.stdout.write("\n".join(render_terminal(run, colour=colour, width=width) for run in runs))


def _check_files(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if a file cannot be written, or would replace another or what is read."""
    check_flags(arguments, "csv", "svg", "html")
    files = {f"--{flag}": getattr(arguments, flag) for flag in ("csv", "svg", "html")}
    problems = [*output_problems(files, [*filter(os.path.isfile, arguments.words)])]
    if (table := arguments.csv) and not is_csv(table) and not is_device(table):
        problems.append(Problem("--csv", f"{table}: give a name that ends in .csv"))
    if problems:
        raise ConfigError(*problems)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m maxpipe.schedule",
        description=__doc__,
        epilog=KEYS_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="SCHEDULE | FILE.csv | CONFIG.yml | solve | key=value",
        help=f"schedules: {', '.join(SCHEDULES)}",
    )
    parser.add_argument("--csv", metavar="FILE", help="write the table as CSV")
    parser.add_argument("--svg", metavar="FILE", help="write a chart as SVG")
    parser.add_argument("--html", metavar="FILE", help="write all schedules' charts as one page")
    parser.add_argument("--plan", action="store_true", help="print what stages do in each tick")
    parser.add_argument(
        "--compare", action="store_true", help="one line per schedule; all of them if none is named"
    )
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="time limit of solve (60); 0: heuristics alone"
    )
    add_import_flag(parser)
    arguments = parser.parse_intermixed_args(argv)
    import_variants(arguments.imports)
    return arguments


if __name__ == "__main__":
    ctrl_c.run(main)
