"""Check flags of `maxpipe.plan` by themselves, and read the amounts in them."""

import argparse
import math
from collections.abc import Iterator

from maxpipe.config.cli import Arguments
from maxpipe.config.errors import Problem
from maxpipe.config.imports import install_command, is_installed
from maxpipe.config.options import OPTIONS
from maxpipe.config.outputs import output_problems
from maxpipe.config.sections import Config
from maxpipe.config.values import Scalar, check_bounds, convert
from maxpipe.plan.search.machine import Machine
from maxpipe.plan.search.space import BATCH

FINALISTS = 3  # compiled by default


def flag_problems(flags: argparse.Namespace) -> Iterator[Problem]:
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


TOKENS, LARGEST, MARGIN = "--tokens-per-step", "--max-global-batch", "--memory-margin"
DEFAULT_MARGIN = "10%"  # share of a device's memory that closed forms leave free by default
MOST_TIMES = 1024  # largest multiple of a step's batch; each doubling up to it is searched


def share_of(text: str) -> float:
    """Return a share that is written as "10%" or "0.1".

    Raises:
      ValueError: it is not from 0 to below 1.
    """
    number = text.removesuffix("%")
    try:
        share = float(number) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share < 1:
        raise ValueError(f"{MARGIN}: expected a share below 100%, such as 10% or 0.1; got {text!r}")
    return share


def largest_margin(memory: float, capacity: float) -> int:
    """Return the largest margin, in percent of `capacity` bytes, with which `memory` bytes fit."""
    return math.floor(100 * (1 - memory / capacity))


def batches_of(
    config: Config, flags: argparse.Namespace, choices: dict[str, list[object]]
) -> tuple[int, ...]:
    """Return the global batches to try, in sequences."""
    if chosen := choices.get(BATCH):
        if flags.tokens_per_step:
            raise ValueError(f"{TOKENS}: {BATCH} is given already")
        if flags.max_global_batch is not None:
            raise ValueError(f"{LARGEST}: {BATCH} is given already")
        return tuple(int(str(batch)) for batch in chosen)
    length, first = config.data.sequence_length, config.data.global_batch_size
    if flags.tokens_per_step:
        tokens = _number(TOKENS, flags.tokens_per_step)
        first, left = divmod(tokens, length)
        if left or first < 1:
            near = max(round(tokens / length), 1) * length
            raise ValueError(
                f"{TOKENS} {flags.tokens_per_step}: give a multiple of "
                f"data.sequence_length={length}; nearest: {near}"
            )
        _check_batch(TOKENS, first)
    if flags.max_global_batch is None:
        return (first,)
    most = _number(LARGEST, flags.max_global_batch)
    if most > MOST_TIMES * first:
        legal = f"at most {MOST_TIMES} times the {first} sequences of a step, {MOST_TIMES * first}"
        raise ValueError(f"{LARGEST} {most}: give {legal}")
    if most < 2 * first:
        raise ValueError(
            f"{LARGEST} {most}: after the {first} sequences of a step, the next batch to try has "
            f"{2 * first}; give at least that, or leave {LARGEST} out"
        )
    _check_batch(LARGEST, most)
    return tuple(first * 2**n for n in range((most // first).bit_length()))


def _number(flag: str, text: str) -> int:
    try:
        return int(str(convert(OPTIONS[BATCH], Scalar(text))))
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def _check_batch(flag: str, batch: int) -> None:
    try:
        check_bounds(OPTIONS[BATCH], batch)
    except ValueError as error:
        raise ValueError(f"{flag}: {BATCH} {error}") from None
