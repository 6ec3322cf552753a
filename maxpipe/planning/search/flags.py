"""Check flags of `maxpipe.plan` by themselves, and the files that it is to write."""

import argparse
import os
from collections.abc import Iterator

from maxpipe.config.cli import Arguments
from maxpipe.config.errors import Problem
from maxpipe.config.paths import unwritable
from maxpipe.config.shipped import locate_config
from maxpipe.planning.search.amounts import TOKENS


def flag_problems(flags: argparse.Namespace) -> Iterator[Problem]:
    """Yield what is wrong with flags by themselves."""
    for flag, text in {"--topology": flags.topology, TOKENS: flags.tokens_per_step}.items():
        if text is not None and not text.strip():
            yield Problem(flag, "is empty; give a value, or leave it out")
    if flags.closed and flags.compile:
        yield Problem("--no-compile", f"contradicts --compile {flags.compile}; give one of them")
    for flag, number in {"--compile": flags.compile, "--probe": flags.probe}.items():
        if number is not None and number < 0:
            yield Problem(flag, f"must be at least 0; got {number}")


def file_problems(arguments: Arguments) -> Iterator[Problem]:
    """Yield why files cannot be written, or would replace each other or what was read."""
    flags = arguments.flags
    taken = {os.path.realpath(file): "the configuration reads" for file in _read_files(arguments)}
    for flag, file in {"--write": flags.write, "--json": flags.json, "--html": flags.html}.items():
        if not file:
            continue
        place = os.path.realpath(file)
        if reason := unwritable(file):
            yield Problem(flag, f"cannot write {file}: {reason}")
        elif place in taken:
            yield Problem(flag, f"would replace {file}, which {taken[place]}; name another file")
        taken.setdefault(place, f"{flag} writes")


def _read_files(arguments: Arguments) -> set[str]:
    """Return the configuration's file and those of its values."""
    sources = arguments.loaded.sources.values()
    places = {source.rpartition(":")[0] for source in sources}
    return {locate_config(arguments.path), *places} - {""}
