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
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from maxpipe.api import schedules
from maxpipe.config.catalog import SCHEDULES
from maxpipe.config.cli import check_flags, print_problems
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import add_import_flag, import_variants
from maxpipe.config.outputs import is_device, output_problems
from maxpipe.config.rules.layout import is_csv
from maxpipe.config.terminal import no_tracebacks
from maxpipe.render.draw import draw
from maxpipe.render.schedule_request import ScheduleKeys, SolveKeys, keys_help, problems_of

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
        draw(arguments)
    except ConfigError as error:
        print_problems(error)
        return 2
    except ValueError as error:  # a schedule that cannot be built
        print_problems(ConfigError(*problems_of(error)))
        return 2
    return 0


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
