"""Read which schedules to simulate or to solve, by the parser and checks of configurations."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from maxpipe.config.catalog import SCHEDULES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.files import read_overrides, repeated_words
from maxpipe.config.options import Option
from maxpipe.config.rules.layout import is_csv
from maxpipe.config.sections.fields import option
from maxpipe.config.values import Raw, Scalar, as_written, check_bounds, convert, nearest
from maxpipe.pipeline.schedules.csv_files import csv_sizes
from maxpipe.pipeline.schedules.load import is_timed, load_schedule
from maxpipe.plan.simulate import Costs, Simulation, simulate
from maxpipe.plan.solve import Task

TIMES = ("forward", "backward", "input_gradient", "weight_gradient", "comm", "head")
REPEATS = {"loop": 1, "v": 2}  # of solve, by placement
_TIME = {"minimum": 0, "maximum": 1e100}


def _times(default: list[float], about: str) -> Any:
    return option(default, about, minimum=0, maximum=1e100)


@dataclass(frozen=True)
class Keys:
    """Sizes and times: of a whole stage, all its chunks, for one microbatch."""

    # Larger tables would take gigabytes.
    stages: int = option(4, "stages", minimum=1, maximum=2_000)
    microbatches: int = option(8, "microbatches in a step", minimum=1, maximum=20_000)
    repeats: int = option(
        1, "chunks of a stage; V schedules have 2, a CSV file its own", minimum=1, maximum=200
    )
    forward: list[float] = _times([1.0], "time of F; one number, or one per stage")  # noqa: RUF009
    backward: list[float] = _times([2.0], "time of B, likewise")  # noqa: RUF009
    input_gradient: list[float] = _times([], "time of I, likewise (half of backward)")  # noqa: RUF009
    weight_gradient: list[float] = _times([], "time of W, likewise (half of backward)")  # noqa: RUF009
    comm: float = option(0.0, "time of one transfer between stages", **_TIME)
    head: float = option(0.0, "time of a microbatch's loss and gradient on one stage", **_TIME)
    activation_bytes: float = option(1.0, "size of one transfer", **_TIME)

    def times(self) -> dict[str, list[float]]:
        """Return the time of a whole stage for each kind of unit: one, or one for each stage."""
        half = [time / 2 for time in self.backward]
        return {
            "forward": self.forward,
            "backward": self.backward,
            "input gradient": self.input_gradient or half,
            "weight gradient": self.weight_gradient or half,
        }

    def costs(self, collectives: float = 0.0) -> Costs:
        """Return the times of a stage's chunks, which share its time equally."""
        forward, backward, input_gradient, weight_gradient = (
            (np.broadcast_to(time, self.stages) / self.repeats).tolist()
            for time in self.times().values()
        )
        others = self.comm, self.head, collectives, self.activation_bytes
        return Costs(forward, backward, input_gradient, weight_gradient, *others)


@dataclass(frozen=True)
class ScheduleKeys(Keys):
    delay_activation_forwarding: bool = option(False, "transfers take a tick of their own")
    overlap_slots: bool = option(False, "a tick of slack between the last stage's F and its B")
    collectives: float = option(
        0.0, "fraction of forward and backward that is collectives", minimum=0, maximum=1
    )

    def costs(self, collectives: float = 0.0) -> Costs:
        return super().costs(self.collectives)


@dataclass(frozen=True)
class SolveKeys(Keys):
    memory: float = option(
        math.inf,
        "most microbatches in flight on a stage; a chunk counts 1/repeats",
        minimum=1,
    )
    placement: str = option("loop", "loop has 1 repeat, v 2, unless given", choices=(*REPEATS,))
    lockstep: str = option(
        "auto",
        "true: for the scheduled engine; false: for mpmd; auto: whichever is faster",
        choices=("auto", "true", "false"),
    )


def simulate_words(
    words: Sequence[str], compare: bool = False, problems: Sequence[Problem] = ()
) -> tuple[list[Simulation], str]:
    """Simulate the schedules that a command line names; return their sizes and times in words, too.

    With `compare` they are all schedules if none is named. ConfigError has these problems, and all
    those of the words.
    """
    names = [word for word in words if "=" not in word]
    values, found = read_keys(ScheduleKeys, [word for word in words if "=" in word])
    found = [*problems, *found]
    if not names and not compare:
        message = f"name a schedule, one of {', '.join(SCHEDULES)}, or a CSV file"
        raise ConfigError(*found, Problem("", message))
    keys, is_lenient = ScheduleKeys(**values), compare or len(names) > 1
    # How many times there must be is not known while the number of stages is wrong.
    counts_times = not any(problem.key == "stages" for problem in found)
    runs = []
    for name in names or SCHEDULES:
        try:
            own = _keys_of(name, keys, values.keys(), is_lenient)
            found += time_problems(own) if counts_times else ()
            build = partial(
                load_schedule,
                name,
                own.stages,
                own.microbatches,
                own.repeats,
                forwarding_delay=1 + own.delay_activation_forwarding,
                slack=int(own.overlap_slots),
            )
            table = build()
            if found:
                continue
            costs = own.costs()
            if is_timed(name) and not values.keys().isdisjoint(TIMES):
                sizes = table.num_stages, table.num_repeats, table.placement
                table = build(times=costs.unit_times(*sizes))
            runs.append(simulate(table, costs))
        except ValueError as error:
            found += problems_of(error)
    if found:
        raise ConfigError(*dict.fromkeys(found))
    return runs, _subtitle(keys, runs)


def _keys_of(
    name: str, keys: ScheduleKeys, given: Collection[str], is_lenient: bool
) -> ScheduleKeys:
    """Return the keys for one schedule, or CSV file with its own sizes unless they are given.

    Where it is lenient, options that the schedule does not have are left out. Raise ValueError if
    the file cannot be read.
    """
    if is_csv(name):
        sizes = zip(("stages", "microbatches", "repeats"), csv_sizes(name), strict=True)
        own: dict[str, Any] = {key: n for key, n in sizes if key not in given}
        return replace(keys, **own)
    facts = SCHEDULES.get(name)
    if facts and (is_lenient or "repeats" not in given):
        keys = replace(keys, repeats=facts.repeats_for(keys.repeats))
    if facts and is_lenient:
        delays = keys.delay_activation_forwarding and facts.delays
        overlaps = keys.overlap_slots and facts.overlaps
        return replace(keys, delay_activation_forwarding=delays, overlap_slots=overlaps)
    return keys


def _subtitle(keys: ScheduleKeys, runs: Sequence[Simulation]) -> str:
    table, times = runs[0].table, keys.times()
    words = [f"{table.num_stages} stages", f"{table.num_microbatches} microbatches"]
    words += ["delay activation forwarding"] * keys.delay_activation_forwarding
    words += ["overlap slots"] * keys.overlap_slots
    if not any("I" in run.table.kinds for run in runs):
        times = {kind: times[kind] for kind in ("forward", "backward")}
    for key, time in (times | {"comm": [keys.comm], "head": [keys.head]}).items():
        words.append(f"{key} " + "/".join(f"{value:g}" for value in time))
    return ", ".join(words) + "; times are of a whole stage and one microbatch"


def read_task(words: Sequence[str], problems: Sequence[Problem] = ()) -> Task:
    """Read the words after `solve`; ConfigError has these problems and those of the words."""
    found = [*problems]
    for word in words:
        if "=" not in word:
            found.append(Problem("", f"{word}: solve takes no schedule, only keys"))
    values, wrong = read_keys(SolveKeys, [word for word in words if "=" in word])
    found += wrong
    keys = SolveKeys(**{"repeats": REPEATS[values.get("placement", "loop")]} | values)
    if not any(problem.key == "stages" for problem in found):
        found += time_problems(keys)
    if found:
        raise ConfigError(*found)
    chunks = keys.microbatches * keys.repeats
    return Task(
        keys.stages,
        keys.microbatches,
        keys.repeats,
        keys.placement,
        {"true": True, "false": False, "auto": None}[keys.lockstep],
        int(min(keys.memory * keys.repeats + 1e-9, chunks)),
        keys.costs(),
    )


def read_keys(section: type[Keys], words: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values of `key=value` words, and what is wrong with others, which are left out."""
    options = {o.key: o for o in _options(section)}
    settings, problems = read_overrides(words)
    problems += repeated_words(words)
    values: dict[str, Any] = {}
    for key, raw in {setting.key: setting.raw for setting in settings}.items():
        try:
            if key not in options:
                known = f"unknown key; there are {', '.join(options)}"
                raise ValueError(f"{known}{nearest(key, [*options])}")
            values[key] = _value(options[key], raw)
        except ValueError as error:
            problems.append(Problem(key, str(error)))
    return values, problems


def _value(key: Option, raw: Raw) -> object:
    """Return a value in the type of its key, or raise ValueError; times need no brackets."""
    if key.type != list[float]:
        value = convert(key, raw)
        check_bounds(key, value)
        return value
    of_stage = replace(key, type=float)
    if isinstance(raw, Scalar):
        raw = [Scalar(text) for text in raw.text.split(",")]
    return [_value(of_stage, item) for item in (raw if isinstance(raw, list) else [raw])]


def keys_help(section: type[Keys], besides: type[Keys] | None = None) -> str:
    known = [field.name for field in fields(besides)] if besides else []
    lines = []
    for key in _options(section):
        if key.key in known:
            continue
        defaults = key.default if isinstance(key.default, list) else [key.default]
        shown = [f" ({as_written(value).removesuffix('.0')})" for value in defaults]
        lines.append(f"  {key.key:<28}{key.bounds.help}{''.join(shown)}")
    return "\n".join(lines)


def _options(section: type[Keys]) -> Iterator[Option]:
    for field in fields(section):
        yield Option(
            field.name, field.type, getattr(section(), field.name), field.metadata["bounds"]
        )


def time_problems(keys: Keys) -> Iterator[Problem]:
    for key in TIMES[:4]:
        times = getattr(keys, key)
        if len(times) not in (0, 1, keys.stages):
            yield Problem(key, f"{times}: give one number, or one per stage ({keys.stages})")


def problems_of(error: ValueError) -> list[Problem]:
    """Return the reasons of an error, each with its key as this command line calls it."""
    if isinstance(error, ConfigError):
        return [*error.problems]
    return [Problem("", reason) for reason in in_own_keys(str(error)).splitlines()]


def in_own_keys(message: str) -> str:
    """Replace configuration keys in a message by the keys of this command line."""
    names = {"mesh.ici.stage": "stages", "pipeline.num_": "", "pipeline.": ""}
    for key, own in names.items():
        message = message.replace(key, own)
    return message
