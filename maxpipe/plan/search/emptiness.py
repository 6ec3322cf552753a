"""Say why values of --fix and --try leave no mesh, engine and schedule; needs no JAX."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from maxpipe.config.catalog import ENGINES, SCHEDULES
from maxpipe.config.errors import Problem
from maxpipe.config.rules.layout import engines_of, schedules_of
from maxpipe.plan.search.space import MESH_KEYS, REPEATS, SCHEDULE, Space, unpriced

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
