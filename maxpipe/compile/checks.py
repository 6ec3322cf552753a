"""Check the command line of `maxpipe.compile` before JAX is imported, which takes seconds."""

import argparse
import re
from collections.abc import Iterator
from importlib import metadata

from maxpipe.compile.prediction.constants import constants_of
from maxpipe.config import Config, ConfigError, Problem, resolve
from maxpipe.config.catalog import ENGINES
from maxpipe.config.cli import Arguments
from maxpipe.config.imports import install_command, is_installed
from maxpipe.config.load import derive_known
from maxpipe.config.outputs import is_device, output_problems
from maxpipe.config.slices import canonical_topology, check_grid, num_devices
from maxpipe.devices.chips import CHIPS, chip_of
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.pipeline.schedules.table import ScheduleError

TOPOLOGY = "compile.topology"
SIMULATED = "cpu"
SAVE = "compile.save"
UNITS = "--units"
ENDINGS = {"--profile": (".html",), "--profile-trace": (".json.gz", ".json")}
_PIN = re.compile(r"libtpu==([\d.]+)\.\*;")  # of jax[tpu]
_UNIT = re.compile(r"([FBIW])(\d+)", re.ASCII)


def check_command(arguments: Arguments) -> None:
    """Check files, topology, the configuration on its devices, and flags that suit its engine."""
    keys = arguments.loaded.config.compile
    if not keys.topology:
        example = "compile.topology=v5p:4x4x4, or cpu for simulated devices"
        raise ConfigError(Problem(TOPOLOGY, f"name the devices to compile for, such as {example}"))
    if keys.load:
        message = "is for maxpipe.train; here compile.save=FILE stores the step"
        raise ConfigError(Problem("compile.load", message))
    if problems := [*_file_problems(arguments)]:
        raise ConfigError(*problems)
    if keys.topology == SIMULATED:
        devices = max(1, arguments.loaded.config.mesh.simulated_devices)
        config = resolve(arguments.loaded, devices, keys.num_slices)
    else:
        topology = canonical_topology(keys.topology)
        check_slice(topology)
        if chip_of(topology) is None:  # only libtpu knows it
            config = derive_known(arguments.loaded.config)
        else:
            devices = num_devices(topology) * keys.num_slices
            config = resolve(arguments.loaded, devices, keys.num_slices)
    if config.pipeline.engine in ENGINES:  # else it is decided once the devices exist
        check_engine(config, arguments.flags)


def check_engine(config: Config, flags: argparse.Namespace) -> None:
    """Check that the flags apply to the engine of a resolved configuration."""
    problems = []
    if ENGINES[config.pipeline.engine].one_program:
        only = f"is for pipeline.engine=mpmd; the {config.pipeline.engine} engine has one program"
        if flags.programs:
            problems.append(Problem("--programs", f"{only}: --hlo FILE"))
        if flags.units:
            problems.append(Problem(UNITS, only))
    else:
        message = "is for a train step in one program; --programs DIR writes those of a step"
        files = _files(config, flags)
        problems += [Problem(key, message) for key in (SAVE, "--hlo", *ENDINGS) if files[key]]
        if flags.programs and flags.units:
            message = "compiles some units, and --programs writes those of all; give one of them"
            problems.append(Problem(UNITS, message))
    if problems:
        raise ConfigError(*problems)
    if flags.units:
        check_units(flags.units, config)


def check_slice(topology: str) -> None:
    """Check that a canonical topology is a real grid of chips, and that libtpu is installed."""
    has_libtpu = is_installed("libtpu")
    # libtpu also describes grids that no slice has, and chips that are in no table.
    if chip_of(topology) or not has_libtpu:
        try:
            check_grid(topology)
        except ValueError as error:
            raise ConfigError(Problem(TOPOLOGY, str(error))) from None
    if not has_libtpu:
        message = (
            f"{topology} needs libtpu, which also works without a TPU; "
            f"install it: {install_command('tpu')}"
        )
        raise ConfigError(Problem(TOPOLOGY, message))


def check_libtpu() -> None:
    """Refuse a libtpu that is newer than the one that the installed JAX pins.

    JAX cannot read some of what it compiles, which shows only when the compiler has finished.
    """
    try:
        installed = metadata.version("libtpu")
    except metadata.PackageNotFoundError:  # a nightly build has another name
        return
    pins = [_PIN.match(line) for line in metadata.requires("jax") or ()]
    for wanted in (pin[1] for pin in pins if pin):
        # As many numbers as are pinned: 0.0.42 of 0.0.42.1.
        ours, theirs = ([int(n) for n in re.findall(r"\d+", v)] for v in (installed, wanted))
        if ours[: len(theirs)] > theirs:
            jax, remedy = metadata.version("jax"), f"pip install 'libtpu=={wanted}.*'"
            message = f"jax {jax} cannot read all that libtpu {installed} compiles: {remedy}"
            raise ConfigError(Problem(TOPOLOGY, message))


def unit_names(words: str) -> list[tuple[str, int]]:
    """Return the kinds and chunks of the units that `--units` names, such as "F1,B1"."""
    names = []
    for word in words.split(","):
        match = _UNIT.fullmatch(word)
        if match is None:
            message = f"{word!r} is no unit; give a kind and a chunk each, such as F1,B1"
            raise ConfigError(Problem(UNITS, message))
        names.append((match[1], int(match[2])))
    return names


def check_units(words: str, config: Config) -> None:
    """Check that the schedule of a resolved configuration has the units that `--units` names."""
    named = [f"{kind}{chunk}" for kind, chunk in unit_names(words)]
    try:
        table = build_table(config)
    except ScheduleError as error:
        # Every reason begins with its key.
        raise ConfigError(*(Problem("", reason) for reason in error.reasons)) from error
    forward = [f"F{chunk}" for chunk in range(table.num_chunks)]
    # A program is sliced into F and B, or into F, I and W; evaluation has F alone.
    backward = "IW" if "W" in table.kinds else "B" if "B" in table.kinds else ""
    known = forward + [f"{k}{c}" for c in reversed(range(table.num_chunks)) for k in backward]
    if missing := [name for name in named if name not in known]:
        message = f"there is no {', '.join(missing)}; there are {', '.join(known)}"
        raise ConfigError(Problem(UNITS, message))


def _files(config: Config, flags: argparse.Namespace) -> dict[str, str | None]:
    """Return the files to write by key or flag; that of compile.save is replaced."""
    return {
        SAVE: config.compile.save,
        "--json": flags.json,
        "--hlo": flags.hlo,
        "--profile": flags.profile,
        "--profile-trace": flags.profile_trace,
    }


def _file_problems(arguments: Arguments) -> Iterator[Problem]:
    """Yield why a file cannot be written, has another ending than its content, or has none."""
    config = arguments.loaded.config
    files = _files(config, arguments.flags)
    problems = [*output_problems(files, arguments.files, {SAVE})]
    yield from problems
    refused = {problem.key for problem in problems}
    reason = _unpredictable(config.compile.topology)
    for key, endings in ENDINGS.items():
        file = files[key]
        if file and key not in refused and not is_device(file) and not file.endswith(endings):
            message = f"writes {' or '.join(endings)}, which {file} does not end in"
            yield Problem(key, message)
        if file and reason:
            yield Problem(key, reason)


def _unpredictable(topology: str) -> str:
    """Return why steps on a topology are not predicted; empty if they are."""
    if topology == SIMULATED:
        return "needs the estimates of a TPU's compiler; use compile.topology=v5p:2x2x2 or such"
    chip = chip_of(canonical_topology(topology))
    if chip and constants_of(chip):
        return ""
    name = chip.name if chip else topology
    reason = f"the clock of {name} is unpublished" if chip else f"{name} is in no table of chips"
    predicted = ", ".join(c.name for c in CHIPS if c.torus and constants_of(c))
    return f"needs a predicted step, and {reason}; there are predictions for {predicted}"
