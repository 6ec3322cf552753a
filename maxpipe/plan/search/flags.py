"""Check flags of `maxpipe.plan` by themselves, and the files that it is to write."""

import argparse
from collections.abc import Iterator

from maxpipe.config.cli import Arguments
from maxpipe.config.errors import Problem
from maxpipe.config.outputs import output_problems


def flag_problems(flags: argparse.Namespace) -> Iterator[Problem]:
    """Yield what is wrong with flags by themselves."""
    if flags.closed and flags.compile:
        yield Problem("--no-compile", f"contradicts --compile {flags.compile}; give one of them")
    if flags.compile is not None and flags.compile < 0:
        yield Problem("--compile", f"must be at least 0; got {flags.compile}")
    if flags.probe is not None:
        yield Problem("--probe", "is gone; use --compile 6, which ranks whole compiled steps")


def file_problems(arguments: Arguments) -> Iterator[Problem]:
    """Yield why files cannot be written, or would replace each other or what was read."""
    flags = arguments.flags
    files = {"--write": flags.write, "--json": flags.json, "--html": flags.html}
    yield from output_problems(files, arguments.files)
