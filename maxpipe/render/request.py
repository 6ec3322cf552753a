"""Parse and simulate schedules that a command line names with `key=value` words."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from maxpipe.config.catalog import SCHEDULES
from maxpipe.pipeline.schedules.csv_files import csv_sizes
from maxpipe.pipeline.schedules.load import is_csv, is_timed, load_schedule
from maxpipe.planning.simulate import Costs, Simulation, simulate

SIZES = {"stages": 4, "microbatches": 8, "repeats": 1}
SWITCHES = ("delay_activation_forwarding", "overlap_slots")
UNIT_COSTS = ("forward", "backward", "input_gradient", "weight_gradient")
OTHER_COSTS = {
    "comm": "communication",
    "head": "head",
    "collectives": "collectives",
    "activation_bytes": "activation_bytes",
}
TIMES = (*UNIT_COSTS, "comm", "head")
KEYS = (*SIZES, *SWITCHES, *UNIT_COSTS, *OTHER_COSTS)


class UsageError(ValueError):
    """A command line that cannot be run; the message names the key."""


@dataclass(frozen=True)
class Request:
    """What the command line names.

    Attributes:
      schedules: names or CSV files.
      sizes: the ones of `SIZES` that the command line gives.
      switches: the ones of `SWITCHES` that are on.
      costs: times of whole stages, not of chunks.
      are_times_given: whether the command line gives any of them; orders then follow them.
    """

    schedules: tuple[str, ...]
    sizes: dict[str, int]
    switches: frozenset[str]
    costs: Costs
    are_times_given: bool

    def subtitle(self, runs: Sequence[Simulation]) -> str:
        """Return sizes and costs in words."""
        table, costs = runs[0].table, self.costs
        words = [f"{table.num_stages} stages", f"{table.num_microbatches} microbatches"]
        words += [switch.replace("_", " ") for switch in SWITCHES if switch in self.switches]
        times = {"forward": costs.forward, "backward": costs.backward}
        if any("I" in run.table.kinds for run in runs):
            times["input gradient"] = costs.input_gradient
            times["weight gradient"] = costs.weight_gradient
        times |= {"comm": costs.communication, "head": costs.head}
        for key, time in times.items():
            words.append(f"{key} " + "/".join(f"{value:g}" for value in np.atleast_1d(time)))
        return ", ".join(words) + "; times are of a whole stage and one microbatch"


def parse_request(words: Sequence[str], compare: bool) -> Request:
    """Parse schedules and `key=value` words; without a schedule, `compare` means all of them.

    Raises:
      UsageError: a word is neither, or a value is not legal.
    """
    schedules = tuple(word for word in words if "=" not in word)
    pairs = dict(word.split("=", 1) for word in words if "=" in word)
    for key in pairs:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"{key}: there is no such key; {hint}keys are {', '.join(KEYS)}")
    if not schedules and not compare:
        raise UsageError(f"name a schedule, one of {', '.join(SCHEDULES)}, or a CSV file")
    sizes = {key: parse_size(key, pairs[key]) for key in SIZES if key in pairs}
    switches = frozenset(key for key in SWITCHES if key in pairs and parse_switch(key, pairs[key]))
    given = not pairs.keys().isdisjoint(TIMES)
    return Request(schedules or tuple(SCHEDULES), sizes, switches, parse_costs(pairs), given)


def simulate_schedule(name: str, request: Request, *, lenient: bool) -> Simulation:
    """Build and simulate one schedule.

    Args:
      name: schedule or CSV file.
      request: sizes, options and costs.
      lenient: leave out what the schedule does not have, instead of refusing it.

    Raises:
      ValueError: the schedule does not exist, is invalid, or does not go with the sizes or options.
    """
    sizes, switches = {**SIZES, **request.sizes}, request.switches
    if is_csv(name):
        sizes = {**dict(zip(SIZES, csv_sizes(name), strict=True)), **request.sizes}
    elif name in SCHEDULES:
        schedule = SCHEDULES[name]
        if lenient or "repeats" not in request.sizes:
            sizes["repeats"] = schedule.repeats_for(sizes["repeats"])
        if lenient:
            has_switch = {
                "delay_activation_forwarding": schedule.delays,
                "overlap_slots": schedule.overlaps,
            }
            switches = frozenset(switch for switch in switches if has_switch[switch])
    build = partial(
        load_schedule,
        name,
        *sizes.values(),
        forwarding_delay=2 if "delay_activation_forwarding" in switches else 1,
        slack=int("overlap_slots" in switches),
    )
    table = build()
    costs = chunk_costs(request.costs, table.num_stages, table.num_repeats)
    if request.are_times_given and is_timed(name):
        times = costs.unit_times(table.num_stages, table.num_repeats, table.placement)
        table = build(times=times)
    return simulate(table, costs)


def in_own_keys(message: str) -> str:
    """Replace configuration keys in a message by the keys of this command line."""
    names = {"mesh.ici.stage": "stages", "pipeline.num_": "", "pipeline.": ""}
    for key, own in names.items():
        message = message.replace(key, own)
    return message


def parse_size(key: str, value: str) -> int:
    """Return a whole number, at least 1.

    Raises:
      UsageError: it is not one.
    """
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(f"{key}={value}: must be a whole number, at least 1")
    return int(value)


def parse_switch(key: str, value: str) -> bool:
    """Return whether a value is true.

    Raises:
      UsageError: it is neither true nor false.
    """
    if value not in ("true", "false"):
        raise UsageError(f"{key}={value}: must be true or false")
    return value == "true"


def parse_costs(pairs: dict[str, str]) -> Costs:
    """Return the times of whole stages that a command line gives, or their defaults.

    Raises:
      UsageError: a value is not a number that is legal for its key.
    """

    def per_stage(key: str, default: float | list[float]) -> float | list[float]:
        if key not in pairs:
            return default
        values = [parse_number(key, number) for number in pairs[key].split(",")]
        return values[0] if len(values) == 1 else values

    backward = per_stage("backward", 2.0)
    # A split backward costs what a whole one does, unless its parts are given.
    half = [value / 2 for value in backward] if isinstance(backward, list) else backward / 2
    other = {
        name: parse_number(key, pairs[key]) for key, name in OTHER_COSTS.items() if key in pairs
    }
    return Costs(
        forward=per_stage("forward", 1.0),
        backward=backward,
        input_gradient=per_stage("input_gradient", half),
        weight_gradient=per_stage("weight_gradient", half),
        **other,
    )


def parse_number(key: str, value: str) -> float:
    """Return a number, at least 0.

    Raises:
      UsageError: it is not one.
    """
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise UsageError(f"{key}={value}: must be a number, at least 0")
    if key == "collectives" and number > 1:
        raise UsageError(f"{key}={value}: must be a fraction from 0 to 1")
    return number


def chunk_costs(costs: Costs, num_stages: int, num_repeats: int) -> Costs:
    """Return the costs of a stage's chunks, which share its time equally.

    Raises:
      ValueError: there are not as many times as stages.
    """
    forward, backward, input_gradient, weight_gradient = (
        (costs.of(kind, num_stages) / num_repeats).tolist() for kind in "FBIW"
    )
    return replace(
        costs,
        forward=forward,
        backward=backward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
    )
