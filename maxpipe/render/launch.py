"""Simulate what the command line of `maxpipe.schedule` names, and print it or write it to files."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from maxpipe.config.errors import ConfigError
from maxpipe.config.files import repeated_words
from maxpipe.config.shipped import names_config
from maxpipe.config.terminal import terminal_width, wants_colour
from maxpipe.pipeline.schedules.csv_files import to_csv
from maxpipe.plan.simulate import Simulation
from maxpipe.render.chart import chart_svg
from maxpipe.render.page import page_html
from maxpipe.render.request import (
    Collector,
    UsageError,
    in_own_keys,
    parse_request,
    simulate_schedules,
)
from maxpipe.render.solver import COMMAND, parse_task, search, solution_text
from maxpipe.render.terminal import comparison_text, render_terminal

DEFAULT_SECONDS = 60.0


def launch(arguments: argparse.Namespace) -> None:
    """Draw the schedules, or the configuration, of a parsed command line.

    Args:
      arguments: words, and the flags csv, svg, html (paths or None), plan, compare and seconds.

    Raises:
      ConfigError: the configuration is wrong, or has no stages that fit.
      ValueError: the command line is wrong, a schedule cannot be built, or a file cannot be made.
    """
    words = arguments.words
    if words and words[0] == COMMAND:
        _solve(arguments)
        return
    if words and names_config(words[0]):
        _draw_configuration(arguments)
    else:
        _draw_schedules(arguments)


def _draw_schedules(arguments: argparse.Namespace) -> None:
    collector = Collector()
    _refuse_seconds(arguments, collector)
    request = parse_request(arguments.words, arguments.compare, collector)
    several = arguments.compare or len(request.schedules) > 1
    for option in ("csv", "svg"):
        if getattr(arguments, option) and several:
            collector.refuse(f"--{option}: name one schedule; it holds no more")
    collector.check()
    runs = simulate_schedules(request, lenient=several)
    for run in runs:
        if run.table.note:
            print(in_own_keys(run.table.note), file=sys.stderr)
    _write_files(arguments, runs, request.subtitle(runs))
    if arguments.compare and not arguments.plan:
        sys.stdout.write(comparison_text(runs))
    elif not _names_files(arguments):
        _print(runs, arguments.plan)


def _solve(arguments: argparse.Namespace) -> None:
    collector = Collector()
    if arguments.compare:
        collector.refuse("--compare: solve compares with named schedules anyway; leave it out")
    seconds = DEFAULT_SECONDS if arguments.seconds is None else arguments.seconds
    if not 0 <= seconds < math.inf:
        collector.refuse(f"--seconds {seconds:g}: must be a number, at least 0")
    task = collector.attempt(None, parse_task, arguments.words[1:])
    collector.check()
    assert task is not None
    solution = search(task, seconds)
    sizes = f"{task.num_stages} stages, {task.num_microbatches} microbatches"
    _write_files(arguments, [solution.run], f"{sizes}; times are of a chunk and one microbatch")
    if not _names_files(arguments):
        _print([solution.run], arguments.plan)
        sys.stdout.write("\n")
    sys.stdout.write(solution_text(solution))


def _with_jax() -> ModuleType:
    # Drawing schedules by name needs no JAX, which is slow to import.
    import maxpipe.render.stages as module

    return module


def _draw_configuration(arguments: argparse.Namespace) -> None:
    collector = Collector()
    _refuse_seconds(arguments, collector)
    if arguments.compare:
        collector.refuse(
            "--compare: is for schedules by name; "
            "a configuration is compared with uniform stages anyway"
        )
    collector.check()
    if problems := repeated_words(arguments.words[1:]):
        raise ConfigError(*problems)
    drawing = _with_jax().draw_configuration(arguments.words[0], arguments.words[1:])
    _write_files(arguments, drawing.runs, drawing.subtitle)
    if not _names_files(arguments):
        _print(drawing.runs[:1], arguments.plan)
        sys.stdout.write("\n" + drawing.text)


def _refuse_seconds(arguments: argparse.Namespace, collector: Collector) -> None:
    if arguments.seconds is not None:
        collector.refuse("--seconds: is for solve; a schedule that is given needs no search")


def _names_files(arguments: argparse.Namespace) -> bool:
    return bool(arguments.csv or arguments.svg or arguments.html) and not arguments.plan


def _write_files(arguments: argparse.Namespace, runs: Sequence[Simulation], subtitle: str) -> None:
    if arguments.csv:
        _write("--csv", arguments.csv, to_csv(runs[0].table))
    if arguments.svg:
        _write("--svg", arguments.svg, chart_svg(runs[0]))
    if arguments.html:
        _write("--html", arguments.html, page_html(runs, subtitle))


def _write(option: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot write it: {error.strerror}") from error
    print(f"wrote {path}", file=sys.stderr)  # stdout may be the file


def _print(runs: Sequence[Simulation], plan: bool) -> None:
    if plan:
        sys.stdout.write(_with_jax().plans_text(runs))
        return
    width = terminal_width(sys.stdout) or 120
    colour = wants_colour(sys.stdout)
    sys.stdout.write("\n".join(render_terminal(run, colour=colour, width=width) for run in runs))
