"""Turn a command line of `maxpipe.plan` into what is searched; needs no JAX."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from maxpipe.config.catalog import ENGINES, REMAT_POLICIES, SCHEDULES
from maxpipe.config.cli import Arguments
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.files import read_overrides, repeated_words, split_values
from maxpipe.config.load import derive_known, load
from maxpipe.config.options import OPTIONS, get, update
from maxpipe.config.outputs import check_new, output_problems
from maxpipe.config.rules.model import MODEL_RULES
from maxpipe.config.rules.rule import Updates, apply_rules
from maxpipe.config.sections import Config
from maxpipe.config.slices import slices_of
from maxpipe.config.values import check_bounds
from maxpipe.plan.search.machine import CPU, Machine, machine_of
from maxpipe.plan.search.space import (
    BATCH,
    DERIVED,
    ENGINE,
    FOLLOWING,
    GATHERS,
    MESH_KEYS,
    POLICY,
    REPEATS,
    SCANS,
    SCHEDULE,
    SEARCHED,
    UNDECIDED,
    Space,
    unpriced,
)

TOPOLOGY, TOKENS, LARGEST = "--topology", "--tokens-per-step", "--max-global-batch"
MARGIN = 0.1  # share of a device's memory that closed forms leave free by default
MOST_TIMES = 1024  # largest multiple of a step's batch; each doubling up to it is searched
_COUNTS = (*MESH_KEYS, "pipeline.num_microbatches", REPEATS, BATCH)


@dataclass(frozen=True)
class Request:
    """What a command line asks for."""

    path: str
    written: Config  # the user's, with what --fix sets of the keys that are not searched
    config: Config  # what all candidates share
    machine: Machine  # with `smallest` that of the smallest slice
    batches: tuple[int, ...]  # global ones to try, in sequences
    choices: dict[str, list[object]]  # values of searched keys that the user gave
    margin: float = MARGIN  # share of a device's memory that closed forms leave free
    smallest: tuple[str, ...] = ()  # slices to try, in this order; empty where the user names one
    imports: tuple[str, ...] = ()  # modules with variants of the user's own
    fixed: tuple[str, ...] = ()  # keys of `choices` whose one value every candidate has

    @property
    def limit(self) -> float | None:
        """Return the bytes that a device may use; None if its memory is unknown."""
        capacity = self.machine.capacity
        return None if capacity is None else (1 - self.margin) * capacity

    def space(self) -> Space:
        machine = self.machine
        return Space(
            self.config,
            machine.devices,
            machine.slices,
            self.choices,
            is_tpu=machine.tpu is not None,
            fixed=self.fixed,
            hosts=machine.hosts,
        )

    def on(self, topology: str, slices: int | None = None) -> "Request":
        """Return the same request on another slice; on as many as before if no number is given."""
        machine = machine_of(topology, slices or self.machine.slices, self.config)
        config = placed(self.config, machine)
        return dataclasses.replace(self, machine=machine, config=config)


def request_of(arguments: Arguments) -> Request:
    """Return what a parsed command line asks for.

    Raises:
      ConfigError: a flag is wrong.
    """
    flags, path, own = arguments.flags, arguments.path, arguments.loaded.config
    files = {"--write": flags.write, "--json": flags.json, "--html": flags.html}
    words = [*flags.overrides, *flags.fix]
    problems = [*output_problems(files, arguments.files), *repeated_words([*words, *flags.tried])]
    if problems:
        raise ConfigError(*problems)
    if flags.write:
        check_new("--write", flags.write)
    loaded = load(path, words, UNDECIDED)
    overridden, fixed_keys = map(_keys, (flags.overrides, flags.fix))
    fixed = {key: [get(loaded.config, key)] for key in fixed_keys}
    tried: dict[str, list[object]] = {}
    for word in flags.tried:
        key, _, text = word.partition("=")
        for part in [f"{key}={value}" for value in split_values(text)]:
            config = load(path, [*words, part], UNDECIDED).config
            for name in _keys([part]):
                values = tried.setdefault(name, [])
                values += [value for value in [get(config, name)] if value not in values]
    choices = {
        key: values
        for key, values in (tried | fixed).items()
        if key in SEARCHED and not (key == GATHERS and "auto" in values)  # left to the search
    }
    written = update(loaded.config, {key: get(own, key) for key in SEARCHED})
    machine, smallest = _machine(flags, written, loaded.sources)
    unread = _unread_tensors(choices)
    problems = [
        *_contradictions(overridden, fixed, tried, flags, own),
        *(
            Problem(key, why)
            for key, values in choices.items()
            if (why := _unpriced(key, values, machine.hosts))
        ),
        *(
            Problem(key, f"no policy that is tried reads it; add --fix {POLICY}=custom")
            for key in unread.keys() & {*overridden, *fixed}
            if get(written, key) != unread[key]
        ),
    ]
    if written.model.lora.rank:
        message = "a plan counts all parameters as trained, and no adapters; plan with 0"
        problems.append(Problem("model.lora.rank", message))
    # What a file says of tensors is dropped, as candidates have other policies.
    shared = shared_config(update(written, unread), machine)
    problems += [
        dataclasses.replace(problem, source=loaded.sources.get(problem.key, ""))
        for problem in apply_rules(MODEL_RULES, shared, ())[1]
    ]
    if problems:
        raise ConfigError(*problems)
    return Request(
        path=path,
        written=written,
        config=shared,
        machine=machine,
        batches=_batches(shared, flags, choices),
        choices=choices,
        margin=MARGIN if flags.memory_margin is None else flags.memory_margin,
        smallest=smallest,
        imports=tuple(flags.imports),
        fixed=tuple(key for key in fixed if key in choices),
    )


def _keys(words: Sequence[str]) -> list[str]:
    return [setting.key for setting in read_overrides(words)[0]]


def _contradictions(
    overridden: Sequence[str],
    fixed: Mapping[str, object],
    tried: Mapping[str, object],
    flags: argparse.Namespace,
    config: Config,
) -> list[Problem]:
    follows = "follows from what the plan decides, or from --topology; leave it out"
    is_cpu = (flags.topology or config.compile.topology).lower() == CPU
    read = {"compile.topology": not flags.topology, "mesh.simulated_devices": is_cpu}
    decides = "is what the plan decides; --fix leaves it no choice"
    searched = f"--try takes what is searched, {', '.join(SEARCHED)}; --fix sets others"
    given = [*fixed, *(key for key in overridden if not read.get(key))]
    problems = [Problem(key, follows) for key in given if key in FOLLOWING]
    problems += [Problem(key, decides) for key in overridden if key in SEARCHED and key != BATCH]
    problems += [Problem(key, searched) for key in tried if key not in SEARCHED]
    if BATCH in {*overridden, *fixed, *tried} and flags.tokens_per_step is not None:
        problems.append(Problem(BATCH, f"is given twice: leave out {TOKENS}, or the batch"))
    if BATCH in {*fixed, *tried} and flags.max_global_batch is not None:
        problems.append(Problem(LARGEST, f"{BATCH} is given already: leave one of them out"))
    if flags.smallest and flags.compare:
        problems.append(Problem("--compare", "needs one slice, and --smallest looks for one"))
    return problems


def _unpriced(key: str, values: Sequence[object], hosts: int) -> str:
    """Return why values of a searched key have no price, though they are legal; "" if they have."""
    if key in _COUNTS and min(map(int, map(str, values))) < 1:
        return "the plan derives nothing: give numbers of at least 1"
    names = list(ENGINES) if key == ENGINE else list(SCHEDULES) if key == SCHEDULE else values
    if unknown := [value for value in values if value not in names]:
        return f"{unknown[0]} has no closed form; the plan tries {', '.join(map(str, names))}"
    for name in map(str, values if key in (ENGINE, SCHEDULE) else ()):
        engines = [name] if key == ENGINE else SCHEDULES[name].engines
        reasons = [unpriced(engine, hosts) for engine in engines]
        if all(reasons):
            return reasons[0] if key == ENGINE else f"{name}: {reasons[0]}"
    return ""


def _unread_tensors(choices: Mapping[str, Sequence[object]]) -> dict[str, object]:
    """Return the keys that say which tensors are saved, with values that save none, if unread."""
    if any(REMAT_POLICIES[str(policy)].by_tensor for policy in choices.get(POLICY, ())):
        return {}
    prefix = "pipeline.remat_tensors."
    return {key: option.default for key, option in OPTIONS.items() if key.startswith(prefix)}


def _machine(
    flags: argparse.Namespace, config: Config, sources: Mapping[str, str]
) -> tuple[Machine, tuple[str, ...]]:
    """Return the devices, and with --smallest the slices to try; the devices are the first's."""
    topology, slices = flags.topology or config.compile.topology, config.compile.num_slices
    own = "" if flags.topology else "compile.topology"
    if not topology:
        raise ConfigError(Problem(TOPOLOGY, "name the devices: v5p:4x4x8, cpu:8 or H100:8"))
    try:
        smallest = tuple(slices_of(topology)) if flags.smallest else ()
        return machine_of(smallest[0] if smallest else topology, slices, config), smallest
    except ValueError as error:
        hint = f"; --smallest is for TPUs, of a kind: {TOPOLOGY} v5p" if flags.smallest else ""
        raise ConfigError(
            Problem(own or TOPOLOGY, f"{error}{hint}", sources.get(own, ""))
        ) from None


def _batches(
    config: Config, flags: argparse.Namespace, choices: Mapping[str, Sequence[object]]
) -> tuple[int, ...]:
    if BATCH in choices:
        return tuple(int(str(batch)) for batch in choices[BATCH])
    length, first = config.data.sequence_length, config.data.global_batch_size
    if flags.tokens_per_step is not None:
        first, left = divmod(flags.tokens_per_step, length)
        if left or first < 1:
            near = max(round(flags.tokens_per_step / length), 1) * length
            message = f"give a multiple of data.sequence_length={length}; nearest: {near}"
            raise ConfigError(Problem(TOKENS, message))
    most = first if flags.max_global_batch is None else flags.max_global_batch
    if flags.max_global_batch is not None and not 2 * first <= most <= MOST_TIMES * first:
        message = f"a step has {first} sequences: give {2 * first} to {MOST_TIMES * first}"
        raise ConfigError(Problem(LARGEST, message))
    try:
        check_bounds(OPTIONS[BATCH], most)
    except ValueError as error:
        raise ConfigError(Problem(TOKENS, f"{BATCH} {error}")) from None
    return tuple(first * 2**n for n in range((most // first).bit_length()))


def shared_config(config: Config, machine: Machine) -> Config:
    """Return what all candidates share, with neutral values of what the plan decides."""
    neutral: Updates = dict.fromkeys(MESH_KEYS, 1)
    neutral |= {key: OPTIONS[key].default for key in (*DERIVED, GATHERS)}
    neutral |= {"pipeline.outside_layers": "after", ENGINE: "auto", SCANS: True}
    config = update(config, neutral)
    return placed(dataclasses.replace(config, model=derive_known(config).model), machine)


def placed(config: Config, machine: Machine) -> Config:
    """Return the configuration for a machine, without programs compiled for another."""
    topology, simulated = machine.topology, 0
    if topology.startswith(CPU):
        topology, simulated = CPU, machine.devices
    elif not machine.is_compilable:
        topology = ""  # a GPU: maxpipe.compile has no compiler for it
    places: Updates = {"compile.topology": topology, "compile.num_slices": machine.slices}
    places |= {"compile.save": "", "compile.load": "", "mesh.simulated_devices": simulated}
    return update(config, places)
