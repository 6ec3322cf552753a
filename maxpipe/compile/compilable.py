"""Check, before JAX is imported, that a compiler is available for --compile and --probe."""

import argparse
from collections.abc import Iterator

from maxpipe.compile.prediction.constants import constants_of
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
    """Yield why --compile or --probe have no compiler, or why its times are unknown.

    Args:
      flags: the command's flags; `compile` is None if it was not given.
      machine: the devices to plan for.
    """
    missing = f"there is no compiler at hand for {machine.topology}; leave it out"
    if flags.compile and not machine.is_compilable:
        yield Problem("--compile", missing)
    if flags.probe and not machine.is_compilable:
        yield Problem("--probe", missing)
    elif flags.probe and constants_of(machine.chip) is None:
        clock = f"since the clock of {machine.chip.name} is"
        yield Problem("--probe", f"the compiler's times are unknown, {clock}; leave it out")
    if number_compiled(flags) and machine.is_compilable and not is_installed("libtpu"):
        remedy = f"{install_command('tpu')}; --no-compile plans by closed forms"
        yield Problem("--compile", f"needs libtpu: {remedy}")
