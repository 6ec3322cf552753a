"""Train with every combination of some values: one run after the other, then a comparison.

Every run is a process of its own, the same as `python -m maxpipe.train` with its words, so that one
that hangs, does not fit in memory or crashes does not affect the others. Imports no JAX.
"""

import argparse
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.files import repeated_words, split_values
from maxpipe.config.imports import import_words
from maxpipe.config.load import Loaded, load
from maxpipe.config.rules.run import check_trains
from maxpipe.config.terminal import INTERRUPTED, emit
from maxpipe.supervise.ending import PREEMPTED, die_with_parent, handling, numbers_to_pass_on
from maxpipe.telemetry.recorder import METRICS

FAILED = 1
STOPPED = (PREEMPTED, INTERRUPTED)  # exit codes of a run that a signal has stopped, after a save
_FLAG = "--sweep"
_OWN = ("run_name", "output_dir")  # of all runs of a sweep
_LONGEST_NAME = 200


class Member(NamedTuple):
    """One run of a sweep, with the values that distinguish it as `key=value`."""

    words: tuple[str, ...]
    name: str
    directory: Path


def add_sweep_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        _FLAG,
        nargs="+",
        metavar="key=V1,V2",
        help="train with every combination of these values, each in a run of its own, and compare",
    )


def sweep(base: Loaded, flags: argparse.Namespace) -> int:
    """Train all members of a sweep, print how they compare, and return the exit code.

    It is 0 if all members ended with 0, a member's own if a signal has stopped it, otherwise 1. A
    member that fails is reported, and the others still run. Raises ConfigError before anything runs
    if the sweep, or one of its configurations, is wrong.
    """
    members = plan_members(base, flags.config, flags.overrides, flags.sweep)
    common = [word for word in flags.overrides if not word.startswith("run_name=")]
    imports = import_words(flags.imports)
    failed: dict[str, int] = {}
    for number, member in enumerate(members, 1):
        emit(f"sweep       {number} of {len(members)}: {member.name} ({' '.join(member.words)})")
        words = [*common, *member.words, f"run_name={member.name}"]
        code = _run([sys.executable, "-m", "maxpipe.train", flags.config, *words, *imports])
        if code in STOPPED:
            emit(f"sweep       stopped in {member.name}; the same command goes on with it")
            return code
        if code:
            failed[member.name] = code
            emit(f"sweep       {member.name} failed: exit code {code}; the others go on")
        emit("")
    # A member that failed before its first step has no figures.
    if runs := [str(m.directory) for m in members if (m.directory / METRICS).is_file()]:
        action = "compare" if len(runs) > 1 else "ls"
        sys.stdout.flush()
        subprocess.run([sys.executable, "-m", "maxpipe.runs", action, *runs], check=False)
    done = len(members) - len(failed)
    codes = "".join(f", {name} failed with exit code {code}" for name, code in failed.items())
    emit(f"sweep       {done} of {len(members)} runs are done{codes}")
    return FAILED if failed else 0


def plan_members(
    base: Loaded, config: str, overrides: Sequence[str], words: Sequence[str]
) -> list[Member]:
    """Return a member for each combination of values; the last key changes fastest."""
    values = _parse(words)
    root, run_name = Path(base.config.output_dir), base.config.run_name
    keys = [key for key, some in values.items() if len(some) > 1]
    members: list[Member] = []
    problems: dict[Problem, None] = {}
    for combination in itertools.product(*values.values()):
        pairs = dict(zip(values, combination, strict=True))
        name = _name(run_name, keys, pairs, {member.name for member in members})
        chosen = tuple(f"{key}={value}" for key, value in pairs.items())
        members.append(Member(chosen, name, root / name))
        problems |= dict.fromkeys(repeated_words([*overrides, *chosen]))
        try:
            check_trains(load(config, [*overrides, *chosen, f"run_name={name}"]).config)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise ConfigError(*problems)
    return members


def _parse(words: Sequence[str]) -> dict[str, list[str]]:
    """Return key -> values of the words of a sweep."""
    values: dict[str, list[str]] = {}
    problems: list[str] = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            problems.append(f"{word!r} is not of the form key=value,value")
        elif key in _OWN:
            problems.append(f"{key} is that of all runs; set it before --sweep")
        values.setdefault(key, []).extend(split_values(text))
    if not problems and all(len(some) == 1 for some in values.values()):
        problems.append(f"names one run; give a key several values, as {words[0]},...")
    if problems:
        raise ConfigError(*(Problem(_FLAG, problem) for problem in problems))
    return values


def _name(run_name: str, keys: Sequence[str], pairs: Mapping[str, str], taken: set[str]) -> str:
    """Return a name that no other member has: the run's, and each key's last word and value."""
    last = [key.rpartition(".")[2] for key in keys]
    parts = [run_name]
    for key, word in zip(keys, last, strict=True):
        shown = word if last.count(word) == 1 else key.replace(".", "_")
        value = re.sub(r"[^A-Za-z0-9.-]+", "_", pairs[key]).strip("_")
        parts.append(f"{shown}_{value}")
    name = "-".join(parts)
    is_legal = len(name) <= _LONGEST_NAME and name not in taken
    return name if is_legal else f"{run_name}-{len(taken) + 1}"


def _run(command: Sequence[str]) -> int:
    """Run a command to its end, pass signals on to it, and return its exit code."""
    sys.stdout.flush()
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None = None) -> None:
        if number != signal.SIGUSR2:  # which asks for a trace
            received.append(number)
        if process is not None:
            process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    with handling([signal.SIGUSR2, *numbers_to_pass_on()], pass_on):
        # In a session of its own it gets each signal once, from here, and can finish and save.
        process = subprocess.Popen(
            command, start_new_session=True, preexec_fn=die_with_parent(os.getpid())
        )
        for number in received[:1]:  # came before there was a process
            pass_on(number)
        code = process.wait()
    if received and code not in STOPPED:
        return INTERRUPTED if received[-1] == signal.SIGINT else PREEMPTED
    return 128 - code if code < 0 else code
