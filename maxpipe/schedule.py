"""Shows what a pipeline schedule costs, before anything is compiled.

python -m maxpipe.schedule lockstep_1f1b stages=4 microbatches=8 repeats=2 python -m
maxpipe.schedule my_schedule.csv --svg my_schedule.svg python -m maxpipe.schedule lockstep_1f1b
circular zb_h2 stages=8 microbatches=32 --html compared.html python -m maxpipe.schedule --compare
stages=8 microbatches=32 repeats=4 backward=2.2 comm=0.05 python -m maxpipe.schedule CONFIG.yml
pipeline.schedule=1f1b pipeline.layers_per_stage=auto
"""

import argparse
import difflib
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from maxpipe.config.catalog import SCHEDULES
from maxpipe.config.cli import print_problems
from maxpipe.config.errors import ConfigError
from maxpipe.pipeline.schedules.csv_files import csv_sizes, to_csv
from maxpipe.pipeline.schedules.load import is_csv, load_schedule
from maxpipe.pipeline.schedules.table import Table
from maxpipe.planning.simulate import Costs, Simulation, simulate
from maxpipe.render.chart import chart_svg
from maxpipe.render.comparison import comparison_text
from maxpipe.render.page import page_html
from maxpipe.render.stages import draw
from maxpipe.render.terminal import render_terminal, wants_colour

SIZES = {"stages": 4, "microbatches": 8, "repeats": 1}
SWITCHES = ("delay_activation_forwarding", "overlap_slots")
UNIT_COSTS = ("forward", "backward", "input_gradient", "weight_gradient")
OTHER_COSTS = {
    "comm": "communication",
    "head": "head",
    "collectives": "collectives",
    "activation_bytes": "activation_bytes",
}
KEYS = (*SIZES, *SWITCHES, *UNIT_COSTS, *OTHER_COSTS)

KEYS_HELP = """\
keys:
  stages, microbatches, repeats    sizes (4, 8, 1; V schedules have 2 repeats, a CSV file has its own sizes)
  delay_activation_forwarding      true: transfers take a tick of their own (false)
  overlap_slots                    true: a tick of slack between the last stage's F and B (false)
  forward, backward                time of a whole stage, all its chunks, for one microbatch (1, 2);
                                   one number, or one for each stage: forward=1,1,1,1.3
  input_gradient, weight_gradient  the two parts of a split backward (half of backward each)
  comm                             time of one transfer between stages (0)
  head                             time of loss and gradient for one microbatch on one stage (0)
  collectives                      fraction of forward and backward that is collectives (0)
  activation_bytes                 size of one transfer (1)

With several schedules, or --compare, those with one chunk per stage run with repeats=1, V schedules
(zb_v, v_half, v_min, dualpipe_v) with repeats=2, and options that a schedule does not have are left
out. Peaks count chunks; --compare counts whole stages instead.

A configuration is drawn with the times that its stages would take by their FLOPs and what they
would hold, beside uniform stages where there are such. All its keys can be given. Devices are those
of compile.topology, else as many as the mesh names, where -1 is 1.
"""


class UsageError(ValueError):
    """A command line that cannot be run; the message names the key."""


@dataclass(frozen=True)
class Request:
    """What the command line asked for.

    Attributes:
      schedules: names or CSV files.
      sizes: those of `SIZES` that were given.
      switches: those of `SWITCHES` that are on.
      costs: times of whole stages, not of chunks.
    """

    schedules: tuple[str, ...]
    sizes: dict[str, int]
    switches: frozenset[str]
    costs: Costs


def parse(words: Sequence[str], compare: bool) -> Request:
    """Reads schedules and `key=value` words.

    Raises:
      UsageError: a word is neither, or a value is not legal.
    """
    schedules = tuple(word for word in words if "=" not in word)
    pairs = dict(word.split("=", 1) for word in words if "=" in word)
    for key in pairs:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"{key}: there is no such key; {hint}keys are {', '.join(KEYS)}")
    if not schedules and not compare:
        raise UsageError(f"name a schedule, one of {', '.join(SCHEDULES)}, or a CSV file")
    sizes = {key: _size(key, pairs[key]) for key in SIZES if key in pairs}
    switches = frozenset(key for key in SWITCHES if key in pairs and _switch(key, pairs[key]))
    return Request(schedules or tuple(SCHEDULES), sizes, switches, _costs(pairs))


def _size(key: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(f"{key}={value}: must be a whole number, at least 1")
    return int(value)


def _switch(key: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise UsageError(f"{key}={value}: must be true or false")
    return value == "true"


def _costs(pairs: dict[str, str]) -> Costs:
    def per_stage(key: str, default: float | list[float]) -> float | list[float]:
        if key not in pairs:
            return default
        values = [_number(key, part) for part in pairs[key].split(",")]
        return values[0] if len(values) == 1 else values

    backward = per_stage("backward", 2.0)
    # A split backward costs what a whole one does, unless its parts are given.
    half = [value / 2 for value in backward] if isinstance(backward, list) else backward / 2
    other = {name: _number(key, pairs[key]) for key, name in OTHER_COSTS.items() if key in pairs}
    return Costs(
        forward=per_stage("forward", 1.0),
        backward=backward,
        input_gradient=per_stage("input_gradient", half),
        weight_gradient=per_stage("weight_gradient", half),
        **other,
    )


def _number(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise UsageError(f"{key}={value}: must be a number, at least 0")
    if key == "collectives" and number > 1:
        raise UsageError(f"{key}={value}: must be a fraction from 0 to 1")
    return number


def run_schedule(name: str, request: Request, lenient: bool) -> Simulation:
    """Builds and simulates one schedule.

    Args:
      name: schedule or CSV file.
      request: sizes, options and costs.
      lenient: leave out what the schedule does not have, instead of refusing it.

    Raises:
      ValueError: the schedule does not exist, is invalid, or does not go with the sizes or options.
    """
    sizes, switches = {**SIZES, **request.sizes}, request.switches
    if is_csv(name):
        sizes = {**dict(zip(SIZES, csv_sizes(name), strict=True)), **request.sizes}
    else:
        if name not in SCHEDULES:
            raise ValueError(
                f"pipeline.schedule={name!r} does not exist; choose one of {', '.join(SCHEDULES)}"
            )
        schedule = SCHEDULES[name]
        if lenient or "repeats" not in request.sizes:
            sizes["repeats"] = schedule.repeats_for(sizes["repeats"])
        if lenient:
            has = {
                "delay_activation_forwarding": schedule.delays,
                "overlap_slots": schedule.overlaps,
            }
            switches = frozenset(switch for switch in switches if has[switch])
    table = load_schedule(
        name,
        *sizes.values(),
        forwarding_delay=2 if "delay_activation_forwarding" in switches else 1,
        slack=int("overlap_slots" in switches),
    )
    return simulate(table, _per_chunk(request.costs, table))


def _per_chunk(costs: Costs, table: Table) -> Costs:
    """Costs of a stage's chunks, which share its time equally."""
    forward, backward, input_gradient, weight_gradient = (
        (costs.of(kind, table.num_stages) / table.num_repeats).tolist() for kind in "FBIW"
    )
    return replace(
        costs,
        forward=forward,
        backward=backward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
    )


def _subtitle(request: Request, runs: Sequence[Simulation]) -> str:
    """Sizes and costs in words, for the page."""
    table, costs = runs[0].table, request.costs
    words = [f"{table.num_stages} stages", f"{table.num_microbatches} microbatches"]
    words += [switch.replace("_", " ") for switch in SWITCHES if switch in request.switches]
    times = {"forward": costs.forward, "backward": costs.backward}
    if any("I" in run.table.kinds for run in runs):
        times |= {"input gradient": costs.input_gradient, "weight gradient": costs.weight_gradient}
    times |= {
        key: getattr(costs, name) for key, name in OTHER_COSTS.items() if key in ("comm", "head")
    }
    for key, time in times.items():
        words.append(f"{key} " + "/".join(f"{value:g}" for value in np.atleast_1d(time)))
    return ", ".join(words) + "; times are of a whole stage and one microbatch"


def _write(option: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot write it: {error.strerror}") from error


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
        metavar="SCHEDULE | FILE.csv | CONFIG.yml | key=value",
        help=f"schedules: {', '.join(SCHEDULES)}",
    )
    parser.add_argument("--csv", metavar="FILE", help="write the table as CSV")
    parser.add_argument("--svg", metavar="FILE", help="write a chart as SVG")
    parser.add_argument(
        "--html", metavar="FILE", help="write charts of all schedules named as one page"
    )
    parser.add_argument(
        "--compare", action="store_true", help="one line per schedule; all of them if none is named"
    )
    return parser.parse_intermixed_args(argv)


def _run(arguments: argparse.Namespace) -> None:
    request = parse(arguments.words, arguments.compare)
    several = arguments.compare or len(request.schedules) > 1
    for option in ("csv", "svg"):
        if getattr(arguments, option) and several:
            raise UsageError(f"--{option}: name one schedule; it holds no more")
    runs = [run_schedule(name, request, several) for name in request.schedules]
    _write_files(arguments, runs, _subtitle(request, runs))
    if arguments.compare:
        sys.stdout.write(comparison_text(runs))
    elif not _files(arguments):
        _show(runs)


def _run_configured(arguments: argparse.Namespace) -> None:
    if arguments.compare:
        raise UsageError(
            "--compare: is for schedules by name; a configuration is set beside uniform stages anyway"
        )
    drawing = draw(arguments.words[0], arguments.words[1:])
    _write_files(arguments, drawing.runs, drawing.subtitle)
    if not _files(arguments):
        _show(drawing.runs[:1])
        sys.stdout.write("\n" + drawing.text)


def _files(arguments: argparse.Namespace) -> bool:
    return bool(arguments.csv or arguments.svg or arguments.html)


def _write_files(arguments: argparse.Namespace, runs: Sequence[Simulation], subtitle: str) -> None:
    if arguments.csv:
        _write("--csv", arguments.csv, to_csv(runs[0].table))
    if arguments.svg:
        _write("--svg", arguments.svg, chart_svg(runs[0]))
    if arguments.html:
        _write("--html", arguments.html, page_html(runs, subtitle))


def _show(runs: Sequence[Simulation]) -> None:
    width = shutil.get_terminal_size((120, 24)).columns
    colour = wants_colour(sys.stdout)
    sys.stdout.write("\n".join(render_terminal(run, colour=colour, width=width) for run in runs))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
      0, or 2 for a command line or a file that is wrong.
    """
    arguments = _arguments(argv)
    try:
        is_config = arguments.words and arguments.words[0].endswith((".yml", ".yaml"))
        run = _run_configured if is_config else _run
        run(arguments)
    except ConfigError as error:
        print_problems(error)
        return 2
    except ValueError as error:
        print(f"error: {_own_keys(str(error))}", file=sys.stderr)
        return 2
    return 0


def _own_keys(message: str) -> str:
    """Configuration keys in a message, as the keys of this command line."""
    names = {"mesh.ici.stage": "stages", "pipeline.num_": "", "pipeline.": ""}
    for key, own in names.items():
        message = message.replace(key, own)
    return message


if __name__ == "__main__":
    sys.exit(main())
