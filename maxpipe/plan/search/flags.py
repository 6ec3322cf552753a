"""Read the flags of `maxpipe.plan`, and say what is wrong with them; needs no JAX."""

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from maxpipe.config.catalog import ENGINES, SCHEDULES
from maxpipe.config.cli import Arguments
from maxpipe.config.errors import Problem
from maxpipe.config.files import Setting, read_overrides, split_values
from maxpipe.config.imports import install_command, is_installed
from maxpipe.config.options import OPTIONS, unknown_key
from maxpipe.config.outputs import output_problems
from maxpipe.config.rules.layout import engines_of, is_csv, schedules_of
from maxpipe.config.sections import Config
from maxpipe.config.values import Scalar, check_bounds, convert, nearest
from maxpipe.plan.search.machine import Machine
from maxpipe.plan.search.space import (
    BATCH,
    FOLLOWING,
    GATHERS,
    MESH_KEYS,
    REPEATS,
    SCHEDULE,
    SEARCHED,
    Space,
    unpriced,
)

TOKENS, LARGEST, MARGIN = "--tokens-per-step", "--max-global-batch", "--memory-margin"
DEFAULT_MARGIN = "10%"  # share of a device's memory that closed forms leave free by default
MOST_TIMES = 1024  # largest multiple of a step's batch; each doubling up to it is searched
FINALISTS = 3  # compiled by default
ENGINE = "pipeline.engine"
_COUNTS = (*MESH_KEYS, "pipeline.num_microbatches", REPEATS, BATCH)
_NARROWING = (*MESH_KEYS, ENGINE, SCHEDULE, REPEATS)


def flag_problems(arguments: Arguments) -> Iterator[Problem]:
    """Yield contradictions of flags, and why files cannot be written or would replace others."""
    flags = arguments.flags
    if flags.closed and flags.compile:
        yield Problem("--no-compile", f"contradicts --compile {flags.compile}; give one of them")
    if flags.compile is not None and flags.compile < 0:
        yield Problem("--compile", f"must be at least 0; got {flags.compile}")
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


def values_of(flag: str, words: Sequence[str]) -> tuple[dict[str, list[object]], list[Problem]]:
    """Return the values of `key=a,b` words, and what is wrong with them."""
    values: dict[str, list[object]] = {}
    problems = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            problems.append(Problem("", f"{flag} {word}: expected {flag} key=value"))
            continue
        given: dict[str, list[object]] = {}
        for part in split_values(text) if flag == "--try" else [text]:
            settings, wrong = read_overrides([f"{key}={part}"])
            problems += [Problem("", f"{flag} {word}: {problem.message}") for problem in wrong]
            for setting in settings:
                try:
                    value = _value(setting)
                except ValueError as error:
                    problems.append(Problem("", f"{flag} {setting.key}: {error}"))
                    continue
                some = given.setdefault(setting.key, [])
                some += [value] * (value not in some)
        twice = given.keys() & values.keys()
        problems += [Problem("", f"{flag} {name}: is given twice") for name in sorted(twice)]
        values |= given
    return values, problems


def _value(setting: Setting) -> object:
    """Return the value of a setting.

    Raises:
      ValueError: there is no such key, or the value is not legal.
    """
    if setting.key not in OPTIONS:
        raise ValueError(unknown_key(setting.key))
    option = OPTIONS[setting.key]
    value = convert(option, setting.raw)
    check_bounds(option, value)
    return value


def problems_of(fixed: dict[str, list[object]], tried: dict[str, list[object]]) -> list[Problem]:
    """Return what is wrong with values of --fix and --try, each legal in a configuration."""
    follows = "follows from what the plan decides, or from --topology; leave it out"
    problems = [Problem("", f"--fix {key}: {follows}") for key in fixed if key in FOLLOWING]
    problems += [
        Problem("", f"--fix {key}: leaves it no choice, and --try {key} does; give one of them")
        for key in fixed
        if key in tried
    ]
    searched = f"the plan searches {', '.join(SEARCHED)}"
    problems += [
        Problem("", f"--try {key}: {searched}; --fix {key}=VALUE sets it")
        for key in tried
        if key not in SEARCHED
    ]
    if len(modes := tried.get(GATHERS, [])) > 1 and "auto" in modes:
        message = f"--try {GATHERS}: auto stands for every mode; leave it or the others out"
        problems.append(Problem("", message))
    for flag, values in (("--fix", fixed), ("--try", tried)):
        messages = {_refusal(key, v): key for key, chosen in values.items() for v in chosen}
        problems += [Problem("", f"{flag} {key}: {text}") for text, key in messages.items() if text]
    return problems


def _refusal(key: str, value: object) -> str:
    """Return why the plan cannot search with a value; "" if it can."""
    if key in _COUNTS and int(str(value)) < 1:
        return f"the plan derives nothing from {value}; give a number of at least 1"
    if key == ENGINE and value not in ENGINES:
        return f"the plan tries engines by name: {', '.join(ENGINES)}; got {value}"
    if key == SCHEDULE and value not in SCHEDULES:
        if is_csv(str(value)):
            return "a schedule from a file has no closed form"
        names = [*SCHEDULES]
        return f"{value!r} is not one of {', '.join(names)}{nearest(str(value), names)}"
    return ""


def is_empty(space: Space) -> bool:
    """Return whether no mesh has an engine and a schedule."""
    stages = set()
    for grid in space.grids():
        count = grid.size("stage")
        if count not in stages:
            stages.add(count)
            if any(space.repeats(schedule, count) for _, schedule in space.pipelines(count)):
                return False
    return True


def emptying(space: Space) -> list[str]:
    """Return keys whose given values together leave nothing, and would not without any of them."""
    keys = [key for key in space.choices if key in _NARROWING]
    for key in [*keys]:
        others = {other: space.choices[other] for other in keys if other != key}
        if is_empty(replace(space, choices=others)):
            keys.remove(key)
    return keys


def emptiness(space: Space) -> Problem:
    """Return which of the given values leave nothing, and what contradicts what, if known."""
    keys = emptying(space)
    given = given_text(space, keys)
    leaves = "leaves" if len(keys) == 1 else "leave"
    message = f"{given} {leaves} no mesh, engine and schedule for {space.devices} devices"
    return Problem("", "; ".join([message, *_explanations(space, keys)]))


def given_text(space: Space, keys: Iterable[str]) -> str:
    """Return the flags that gave values of keys."""
    flags = {key: "--fix" if key in space.fixed else "--try" for key in keys}
    values = {key: ",".join(map(str, space.choices[key])) for key in keys}
    return " and ".join(f"{flags[key]} {key}={values[key]}" for key in flags)


def _explanations(space: Space, keys: Sequence[str]) -> list[str]:
    """Return what contradicts what, as far as it is known."""
    lines = [_of_mesh(space, level, keys) for level in ("ici", "dcn")]
    engines = [str(name) for name in space.choices.get(ENGINE, ())] if ENGINE in keys else []
    schedules = [str(name) for name in space.choices.get(SCHEDULE, ())] if SCHEDULE in keys else []
    if engines and schedules:
        lines += [f"{name} runs on {', '.join(engines_of(name))}" for name in schedules]
    for name in engines or [e for s in schedules for e in SCHEDULES[s].engines]:
        if reason := unpriced(name, space.hosts):
            lines.append(reason)
        elif not engines:
            continue
        elif not ENGINES[name].has_stages:
            lines.append(f"{name} has no stages")
        elif schedules:
            runs = [schedule for schedule in schedules_of(name) if schedule in SCHEDULES]
            lines.append(f"{name} runs {', '.join(runs)}")
        else:
            lines.append(f"{name} needs at least 2 stages")
    if REPEATS in keys:
        own = {name: SCHEDULES[name].repeats for name in schedules}
        lines += [f"{name} has {REPEATS}={number}" for name, number in own.items() if number]
    return [*dict.fromkeys(line for line in lines if line)]


def _of_mesh(space: Space, level: str, keys: Sequence[str]) -> str:
    """Return which axis sizes are legal if the keys are all of one level of the mesh."""
    prefix = f"mesh.{level}."
    if not all(key.startswith(prefix) for key in keys):
        return ""
    count = space.slices if level == "dcn" else space.devices // space.slices
    what = ("slice" if level == "dcn" else "device") + "s" * (count > 1)
    what = f"{count} {what}" + " of a slice" * (space.slices > 1 and level == "ici")
    if len(keys) > 1:
        return f"the sizes of all axes together make {what}"
    legal = ", ".join(map(str, space.dividing(keys[0].removeprefix(prefix), count)))
    return f"it must divide {what}; legal here: {legal}"
