"""Parse and simulate schedules that a command line names with `key=value` words."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np

from maxpipe.config.catalog import SCHEDULES
from maxpipe.config.errors import RefusedError
from maxpipe.config.rules.layout import is_csv
from maxpipe.pipeline.schedules.csv_files import csv_sizes
from maxpipe.pipeline.schedules.load import check_named, is_timed, load_schedule
from maxpipe.plan.simulate import Costs, Simulation, simulate

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
MOST_CELLS = 10**8  # in a table; as many take gigabytes
KEYS = (*SIZES, *SWITCHES, *UNIT_COSTS, *OTHER_COSTS)


P = ParamSpec("P")
T = TypeVar("T")


class UsageError(RefusedError):
    """A command line that cannot be run; every reason names its key."""


class Collector:
    """Tries the parts of a command line and keeps the reasons why some of them are refused.

    Attributes:
      reasons: the reasons so far, each once.
    """

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def refuse(self, reason: str) -> None:
        """Keep a reason."""
        if reason not in self.reasons:
            self.reasons.append(reason)

    def attempt(self, stand_in: T, part: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a part returns, or the stand-in where it raises a ValueError."""
        try:
            return part(*args, **kwargs)
        except ValueError as error:
            for reason in error.reasons if isinstance(error, RefusedError) else (str(error),):
                self.refuse(reason)
            return stand_in

    def check(self) -> None:
        """Raise UsageError with all reasons, if there are any."""
        if self.reasons:
            raise UsageError(*self.reasons)


@dataclass(frozen=True)
class Request:
    """What the command line names.

    Attributes:
      schedules: names or CSV files.
      sizes: values of those `SIZES` that the command line gives.
      switches: those of `SWITCHES` that are on.
      costs: times of whole stages, not of chunks.
      are_times_given: whether the command line gives any times; orders then follow them.
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


def parse_request(words: Sequence[str], compare: bool, collector: Collector) -> Request:
    """Parse schedules and `key=value` words, and check what needs no table to be built.

    Args:
      words: words of the command line.
      compare: whether to take all schedules if none is named.
      collector: keeps why words are refused; refused words are not in the request.
    """
    schedules = tuple(word for word in words if "=" not in word)
    pairs = parse_pairs(words, KEYS, "there is", collector)
    if not schedules and not compare:
        collector.refuse(f"name a schedule, one of {', '.join(SCHEDULES)}, or a CSV file")
    sizes = parse_sizes(pairs, collector)
    switches = frozenset(
        key
        for key in SWITCHES
        if key in pairs and collector.attempt(False, parse_switch, key, pairs[key])
    )
    costs = parse_costs(pairs, collector)
    given = not pairs.keys().isdisjoint(TIMES)
    request = Request(schedules or tuple(SCHEDULES), sizes, switches, costs, given)
    lenient = compare or len(request.schedules) > 1
    # Without the number of stages, the number of times cannot be checked.
    checked_costs = None if is_refused("stages", pairs, sizes) else costs
    for name in request.schedules:
        options = collector.attempt(None, options_of, name, request, lenient=lenient)
        if options is not None:
            _check_schedule(name, options, checked_costs, collector)
    return request


def simulate_schedules(request: Request, *, lenient: bool) -> list[Simulation]:
    """Build and simulate all schedules of a request; `lenient` as in `options_of`.

    Raises:
      UsageError: some cannot be built; with all reasons.
    """
    collector = Collector()
    runs = [
        collector.attempt(None, simulate_schedule, name, request, lenient=lenient)
        for name in request.schedules
    ]
    collector.check()
    return [run for run in runs if run is not None]


def simulate_schedule(name: str, request: Request, *, lenient: bool) -> Simulation:
    """Build and simulate one schedule; `lenient` as in `options_of`.

    Raises:
      ValueError: the schedule does not exist, is invalid, or does not go with the sizes or options.
    """
    options = options_of(name, request, lenient=lenient)
    build = partial(
        load_schedule,
        name,
        options.stages,
        options.microbatches,
        options.repeats,
        forwarding_delay=options.forwarding_delay,
        slack=options.slack,
    )
    table = build()
    costs = chunk_costs(request.costs, table.num_stages, table.num_repeats)
    if request.are_times_given and is_timed(name):
        times = costs.unit_times(table.num_stages, table.num_repeats, table.placement)
        table = build(times=times)
    return simulate(table, costs)


class Options(NamedTuple):
    """What a schedule is built with, as in `load_schedule`."""

    stages: int
    microbatches: int
    repeats: int
    forwarding_delay: int
    slack: int


def options_of(name: str, request: Request, *, lenient: bool) -> Options:
    """Return what to build one schedule with.

    Args:
      name: schedule or CSV file.
      request: sizes and options.
      lenient: whether to leave out options that the schedule does not have.

    Raises:
      ValueError: the file cannot be read.
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
    return Options(
        sizes["stages"],
        sizes["microbatches"],
        sizes["repeats"],
        forwarding_delay=2 if "delay_activation_forwarding" in switches else 1,
        slack=int("overlap_slots" in switches),
    )


def _check_schedule(name: str, options: Options, costs: Costs | None, collector: Collector) -> None:
    """Keep reasons to refuse one schedule that are known before it is built."""
    sizes = options.stages, options.microbatches, options.repeats
    if not collector.attempt(False, check_cells, *sizes):
        return
    if not is_csv(name):
        collector.attempt(None, check_named, name, *options)
    if costs is not None and (is_csv(name) or name in SCHEDULES):
        collector.attempt(None, chunk_costs, costs, options.stages, options.repeats)


def parse_pairs(
    words: Sequence[str], keys: Sequence[str], subject: str, collector: Collector
) -> dict[str, str]:
    """Return the values by key of those words that are `key=value`.

    Args:
      words: words of the command line.
      keys: keys that there are.
      subject: beginning of the sentence that there is no such key.
      collector: keeps why words are refused; refused words are left out.
    """
    pairs: dict[str, str] = {}
    for key, value in (word.split("=", 1) for word in words if "=" in word):
        if key not in keys:
            collector.refuse(_no_key(key, keys, subject))
        elif key in pairs:
            collector.refuse(f"{key}: is given twice; keep one")
        else:
            pairs[key] = value
    return pairs


def _no_key(key: str, keys: Sequence[str], subject: str) -> str:
    """Return a message that there is no such key, with the keys; `subject` begins the sentence."""
    near = difflib.get_close_matches(key, keys, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{key}: {subject} no such key; {hint}keys are {', '.join(keys)}"


def in_own_keys(message: str) -> str:
    """Replace configuration keys in a message by the keys of this command line."""
    names = {"mesh.ici.stage": "stages", "pipeline.num_": "", "pipeline.": ""}
    for key, own in names.items():
        message = message.replace(key, own)
    return message


def parse_sizes(pairs: dict[str, str], collector: Collector) -> dict[str, int]:
    """Return the sizes that a command line gives, without those that are refused."""
    sizes = {
        key: collector.attempt(None, parse_size, key, pairs[key]) for key in SIZES if key in pairs
    }
    return {key: size for key, size in sizes.items() if size is not None}


def is_refused(key: str, pairs: Mapping[str, str], sizes: Mapping[str, int]) -> bool:
    """Return whether a command line gives a size that `parse_sizes` has left out."""
    return key in pairs and key not in sizes


def parse_size(key: str, value: str) -> int:
    """Return a whole number, at least 1.

    Raises:
      UsageError: it is not one.
    """
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(f"{key}={value}: must be a whole number, at least 1")
    return int(value)


def check_cells(stages: int, microbatches: int, repeats: int) -> bool:
    """Return True if a table of these sizes fits into memory.

    Raises:
      UsageError: it does not.
    """
    cells = stages * (stages + microbatches) * repeats
    if cells > MOST_CELLS:
        raise UsageError(
            f"stages={stages} microbatches={microbatches} repeats={repeats}: a table would have "
            f"{cells:.3g} cells; give smaller ones, of at most {MOST_CELLS:.3g} in all"
        )
    return True


def parse_switch(key: str, value: str) -> bool:
    """Return whether a value is true.

    Raises:
      UsageError: it is neither true nor false.
    """
    if value not in ("true", "false"):
        raise UsageError(f"{key}={value}: must be true or false")
    return value == "true"


def parse_costs(pairs: dict[str, str], collector: Collector) -> Costs:
    """Return the times of whole stages that a command line gives, or their defaults.

    Args:
      pairs: values by key.
      collector: keeps why values are refused; refused values count as 1.
    """

    def per_stage(key: str, default: float | list[float]) -> float | list[float]:
        if key not in pairs:
            return default
        values = [
            collector.attempt(1.0, parse_number, key, number) for number in pairs[key].split(",")
        ]
        return values[0] if len(values) == 1 else values

    backward = per_stage("backward", 2.0)
    # A split backward costs what a whole one does, unless its parts are given.
    half = [value / 2 for value in backward] if isinstance(backward, list) else backward / 2
    other = {
        name: collector.attempt(1.0, parse_number, key, pairs[key])
        for key, name in OTHER_COSTS.items()
        if key in pairs
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
    if number and not 1e-100 <= number <= 1e100:  # sums and quotients leave the range of floats
        raise UsageError(f"{key}={value}: must be 0, or from 1e-100 to 1e100")
    if key == "collectives" and number > 1:
        raise UsageError(f"{key}={value}: must be a fraction from 0 to 1")
    return number


def chunk_costs(costs: Costs, num_stages: int, num_repeats: int) -> Costs:
    """Return the costs of a stage's chunks, which share its time equally.

    Raises:
      UsageError: there are not as many times as stages; with all such keys.
    """
    collector = Collector()
    for kind in "FB":
        collector.attempt(None, costs.of, kind, num_stages)
    half = np.asarray(costs.backward) / 2
    for kind, time in (("I", costs.input_gradient), ("W", costs.weight_gradient)):
        if not np.array_equal(time, half):  # else the reason is given for backward
            collector.attempt(None, costs.of, kind, num_stages)
    collector.check()
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
