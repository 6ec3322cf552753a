"""Check, before JAX is imported, that a compiler is available for --compile."""

import argparse
from collections.abc import Iterator

from maxpipe.config.errors import Problem
from maxpipe.config.imports import install_command, is_installed
from maxpipe.plan.search.machine import Machine

FINALISTS = 3  # compiled by default


def number_compiled(flags: argparse.Namespace) -> int:
    """Return how many rows are compiled."""
    if flags.compile is not None:
        return int(flags.compile)
    return 0 if flags.closed else FINALISTS


def compiler_problems(flags: argparse.Namespace, machine: Machine) -> Iterator[Problem]:
    """Yield why --compile has no compiler.

    Args:
      flags: the command's flags; `compile` is None if it was not given.
      machine: the devices to plan for.
    """
    if flags.compile and not machine.is_compilable:
        missing = f"there is no compiler at hand for {machine.topology}; leave it out"
        yield Problem("--compile", missing)
    if number_compiled(flags) and machine.is_compilable and not is_installed("libtpu"):
        remedy = f"{install_command('tpu')}; --no-compile plans by closed forms"
        yield Problem("--compile", f"needs libtpu: {remedy}")
