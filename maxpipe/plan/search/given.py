"""Read --fix key=value and --try key=a,b, and say why they leave nothing; needs no JAX."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from maxpipe.config.catalog import ENGINES, SCHEDULES
from maxpipe.config.errors import Problem
from maxpipe.config.files import Setting, read_overrides, split_values
from maxpipe.config.options import OPTIONS, unknown_key
from maxpipe.config.rules.layout import engines_of, is_csv, schedules_of
from maxpipe.config.values import check_bounds, convert, nearest
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

_COUNTS = (*MESH_KEYS, "pipeline.num_microbatches", REPEATS, BATCH)


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
    problems = [
        Problem(
            "",
            f"--fix {key}: follows from what the plan decides, or from --topology; leave it out",
        )
        for key in fixed
        if key in FOLLOWING
    ]
    problems += [
        Problem("", f"--fix {key}: leaves it no choice, and --try {key} does; give one of them")
        for key in fixed
        if key in tried
    ]
    problems += [
        Problem(
            "", f"--try {key}: the plan searches {', '.join(SEARCHED)}; --fix {key}=VALUE sets it"
        )
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
    if key == "pipeline.engine" and value not in ENGINES:
        return f"the plan tries engines by name: {', '.join(ENGINES)}; got {value}"
    if key == "pipeline.schedule" and value not in SCHEDULES:
        if is_csv(str(value)):
            return "a schedule from a file has no closed form"
        names = [*SCHEDULES]
        return f"{value!r} is not one of {', '.join(names)}{nearest(str(value), names)}"
    return ""


ENGINE = "pipeline.engine"
_NARROWING = (*MESH_KEYS, ENGINE, SCHEDULE, REPEATS)
_MOST_NAMED = 3  # keys that are tried together, before all are named


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
    """Return the fewest keys whose given values together leave nothing."""
    keys = [key for key in space.choices if key in _NARROWING]
    for number in range(1, min(len(keys), _MOST_NAMED + 1)):
        for few in itertools.combinations(keys, number):
            if is_empty(replace(space, choices={key: space.choices[key] for key in few})):
                return [*few]
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
