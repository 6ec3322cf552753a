"""Turn a command line of `maxpipe.plan` into what is searched; needs no JAX."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from maxpipe.config.catalog import REMAT_POLICIES
from maxpipe.config.cli import Arguments
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.files import COMMAND_LINE, read_overrides
from maxpipe.config.load import derive_known, load
from maxpipe.config.options import OPTIONS, get, update
from maxpipe.config.rules.model import MODEL_RULES
from maxpipe.config.rules.rule import Updates, apply_rules
from maxpipe.config.sections import Config
from maxpipe.config.slices import slices_of
from maxpipe.plan.search.flags import (
    DEFAULT_MARGIN,
    MARGIN,
    TOKENS,
    batches_of,
    emptiness,
    is_empty,
    problems_of,
    share_of,
    values_of,
)
from maxpipe.plan.search.machine import CPU, Machine, machine_of
from maxpipe.plan.search.space import (
    BATCH,
    DERIVED,
    FOLLOWING,
    GATHERS,
    MESH_KEYS,
    SCANS,
    SEARCHED,
    UNDECIDED,
    Space,
)

TOPOLOGY = "--topology"
_POLICY = "pipeline.remat_policy"
_REMEDY = f"add --fix {_POLICY}=custom, or leave it out"


@dataclass(frozen=True)
class Request:
    """What a command line asks for.

    Attributes:
      path: path of the user's file.
      written: the user's configuration, with the other keys that --fix sets.
      config: what all candidates share.
      machine: the devices; with `smallest` those of the smallest slice.
      batches: global batches to try, in sequences.
      choices: values of searched keys that the user gave.
      margin: share of a device's memory that closed forms leave free.
      smallest: slices to try, the smallest first; empty where the user names one.
      imports: modules with variants of the user's own.
      fixed: keys of `choices` whose one value every candidate has.
    """

    path: str
    written: Config
    config: Config
    machine: Machine
    batches: tuple[int, ...]
    choices: dict[str, list[object]]
    margin: float
    smallest: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()

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
      ConfigError: a flag is wrong; with all problems.
    """
    flags, loaded = arguments.flags, arguments.loaded
    overridden = [key for key in SEARCHED if loaded.sources.get(key) == COMMAND_LINE]
    fixed, fix_problems = values_of("--fix", flags.fix)
    tried, try_problems = values_of("--try", flags.tried)
    problems = [*fix_problems, *try_problems, *problems_of(fixed, tried)]
    if BATCH in overridden and (flags.tokens_per_step or BATCH in {*fixed, *tried}):
        problems.append(Problem(BATCH, f"is given twice: leave out {TOKENS}, --fix, --try of it"))
    problems += [
        Problem(key, f"is what the plan decides; --fix {key}={value} leaves it no choice")
        for key, value in ((key, get(loaded.config, key)) for key in overridden)
        if key != BATCH
    ]
    problems += [
        Problem(key, "follows from what the plan decides, or from --topology; leave it out")
        for key in FOLLOWING
        if loaded.sources.get(key) == COMMAND_LINE and not _is_read(key, flags, loaded.config)
    ]
    if flags.smallest and flags.compare:
        problems.append(Problem("--compare", "needs one slice, and --smallest looks for one"))
    choices = {
        key: values
        for key, values in (tried | fixed).items()
        if key in SEARCHED and (key, values) != (GATHERS, ["auto"])  # left to the search
    }
    config = loaded.config
    try:
        config = _fixed_config(arguments, {*fixed} - {*SEARCHED, *FOLLOWING})
        machine, smallest = _machine(flags, config, loaded.sources)
    except ConfigError as error:
        problems += error.problems
    # What a file says of tensors is dropped, as candidates have other policies.
    unread = _unread_tensors(choices)
    problems += [
        Problem(key, f"{get(config, key)}: no policy that is tried reads it; {_REMEDY}")
        for key, default in unread.items()
        if (key in fixed or loaded.sources.get(key) == COMMAND_LINE) and get(config, key) != default
    ]
    if config.model.lora.rank:
        message = "a plan counts all parameters as trained, and no adapters; plan with 0"
        problems.append(Problem("model.lora.rank", message))
    try:
        margin = share_of(DEFAULT_MARGIN if flags.memory_margin is None else flags.memory_margin)
        batches = batches_of(config, flags, choices)
    except ValueError as error:
        problems.append(Problem("", str(error)))
    if problems:
        raise ConfigError(*problems)
    shared = shared_config(update(config, unread), machine)
    if problems := apply_rules(MODEL_RULES, shared, ())[1]:
        raise ConfigError(
            *(dataclasses.replace(p, source=loaded.sources.get(p.key, "")) for p in problems)
        )
    if machine.capacity is None and flags.memory_margin is not None:
        message = (
            "is a share of a device's memory, which simulated devices do not have; leave it out"
        )
        raise ConfigError(Problem(MARGIN, message))
    request = Request(
        path=arguments.path,
        written=config,
        config=shared,
        machine=machine,
        batches=batches,
        choices=choices,
        margin=margin,
        smallest=smallest,
        imports=tuple(flags.imports),
        fixed=tuple(key for key in fixed if key in choices),
    )
    if not smallest and is_empty(request.space()):
        raise ConfigError(emptiness(request.space()))
    return request


def _is_read(key: str, flags: argparse.Namespace, config: Config) -> bool:
    """Return whether the devices are those that a key of the configuration names."""
    if key == "compile.topology":
        return flags.topology is None
    topology = flags.topology or config.compile.topology
    return key == "mesh.simulated_devices" and topology.lower() == CPU


def _fixed_config(arguments: Arguments, keys: Set[str]) -> Config:
    """Return the configuration with what --fix sets of the keys that are not searched.

    Raises:
      ConfigError: it breaks a rule; with all problems. Or a word sets searched keys as well.
    """
    words = []
    for word in arguments.flags.fix:
        named = {setting.key for setting in read_overrides([word])[0]}
        if named & keys and named & {*SEARCHED}:
            message = "sets keys that the plan searches and others; give --fix for each of them"
            raise ConfigError(Problem("", f"--fix {word}: {message}"))
        if named and named <= keys:  # else it is wrong, which `values_of` says
            words.append(word)
    if not words:
        return arguments.loaded.config
    try:
        return load(arguments.path, [*arguments.flags.overrides, *words], UNDECIDED).config
    except ConfigError as error:
        given = ", ".join(f"--fix {word}" for word in words)
        raise ConfigError(
            *(
                dataclasses.replace(p, source=f"{p.source or COMMAND_LINE}, with {given}")
                for p in error.problems
            )
        ) from None


def _unread_tensors(choices: Mapping[str, Sequence[object]]) -> dict[str, object]:
    """Return the keys that say which tensors are saved, with values that save none.

    There are none if a policy that is tried reads them.
    """
    if any(REMAT_POLICIES[str(policy)].by_tensor for policy in choices.get(_POLICY, ())):
        return {}
    prefix = "pipeline.remat_tensors."
    return {key: option.default for key, option in OPTIONS.items() if key.startswith(prefix)}


def _machine(
    flags: argparse.Namespace, config: Config, sources: Mapping[str, str]
) -> tuple[Machine, tuple[str, ...]]:
    """Return the devices, and with --smallest the slices to try; the devices are the first's.

    Raises:
      ConfigError: there are no such devices.
    """
    topology, slices = flags.topology or config.compile.topology, config.compile.num_slices
    if not topology:
        raise ConfigError(Problem(TOPOLOGY, "name the devices: v5p:4x4x8, cpu:8 or H100:8"))
    try:
        smallest = tuple(slices_of(topology)) if flags.smallest else ()
        machine = machine_of(smallest[0] if smallest else topology, slices, config)
    except ValueError as error:
        hint = f"; --smallest is for TPUs, of a kind: {TOPOLOGY} v5p" if flags.smallest else ""
        if flags.topology:
            raise ConfigError(Problem(TOPOLOGY, f"{error}{hint}")) from None
        own = "compile.topology"
        raise ConfigError(Problem(own, f"{error}{hint}", sources[own])) from None
    return machine, smallest


def shared_config(config: Config, machine: Machine) -> Config:
    """Return what all candidates share, with neutral values of what the plan decides."""
    neutral: Updates = dict.fromkeys(MESH_KEYS, 1)
    neutral |= {key: OPTIONS[key].default for key in (*DERIVED, GATHERS)}
    neutral |= {"pipeline.outside_layers": "after", "pipeline.engine": "auto", SCANS: True}
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
