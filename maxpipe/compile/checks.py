"""Check the command line of `maxpipe.compile` before JAX is imported, which takes seconds."""

import argparse

from maxpipe.compile.unit_names import UNITS, check_units
from maxpipe.config import Config, ConfigError, Loaded, Problem, resolve
from maxpipe.config.catalog import ENGINES
from maxpipe.config.imports import install_command, is_installed
from maxpipe.config.load import derive_known
from maxpipe.config.slices import canonical_topology, check_grid, num_devices
from maxpipe.devices.chips import chip_of

TOPOLOGY = "compile.topology"
SIMULATED = "cpu"


def check_command(loaded: Loaded, flags: argparse.Namespace) -> None:
    """Check the topology, the configuration on its devices, and the flags that suit its engine.

    Args:
      loaded: the configuration, with a topology.
      flags: the command's own flags.

    Raises:
      ConfigError: there is no such slice, libtpu is not installed, the configuration does not fit
        the devices, or a flag does not apply.
    """
    if loaded.config.compile.topology != SIMULATED:
        check_slice(canonical_topology(loaded.config.compile.topology))
    config = _resolved(loaded)
    if config.pipeline.engine not in ENGINES:
        return  # only libtpu knows the chip: the engine is decided once its devices exist
    check_engine(config, flags)


def check_engine(config: Config, flags: argparse.Namespace) -> None:
    """Check that the flags apply to the engine of a resolved configuration.

    Raises:
      ConfigError: a flag does not apply.
    """
    if ENGINES[config.pipeline.engine].one_program:
        _check_one_program(config, flags)
    else:
        _check_several_programs(config, flags)


def check_slice(topology: str) -> None:
    """Check that a canonical topology is a real grid of chips, and that libtpu is installed.

    Raises:
      ConfigError: there is no such grid, or libtpu is not installed.
    """
    if chip_of(topology):  # libtpu also describes grids that no slice has
        try:
            check_grid(topology)
        except ValueError as error:
            raise ConfigError(Problem(TOPOLOGY, str(error))) from None
    if not is_installed("libtpu"):
        message = (
            f"{topology} needs libtpu, which also works without a TPU; "
            f"install it: {install_command('tpu')}"
        )
        raise ConfigError(Problem(TOPOLOGY, message))


def _resolved(loaded: Loaded) -> Config:
    """Return the configuration, resolved for its devices unless only libtpu knows their chip."""
    keys = loaded.config.compile
    if keys.topology == SIMULATED:
        return resolve(loaded, max(1, loaded.config.mesh.simulated_devices), keys.num_slices)
    topology = canonical_topology(keys.topology)
    if chip_of(topology) is None:
        return derive_known(loaded.config)
    return resolve(loaded, num_devices(topology) * keys.num_slices, keys.num_slices)


def _of_one_program(config: Config, flags: argparse.Namespace) -> dict[str, str | None]:
    """Return the output files that only a train step in one program has, by key or flag."""
    return {
        "compile.save": config.compile.save,
        "--hlo": flags.hlo,
        "--profile": flags.profile,
        "--profile-trace": flags.profile_trace,
    }


def _check_one_program(config: Config, flags: argparse.Namespace) -> None:
    engine = config.pipeline.engine
    only = f"is for pipeline.engine=mpmd; the {engine} engine has one program"
    if flags.programs:
        raise ConfigError(Problem("--programs", f"{only}: --hlo FILE"))
    if flags.units:
        raise ConfigError(Problem(UNITS, only))


def _check_several_programs(config: Config, flags: argparse.Namespace) -> None:
    problems = [
        Problem(key, "is for a train step in one program; --programs DIR writes those of a step")
        for key, file in _of_one_program(config, flags).items()
        if file
    ]
    if flags.programs and flags.units:
        message = "compiles some units, and --programs writes those of all; give one of them"
        problems.append(Problem(UNITS, message))
    if problems:
        raise ConfigError(*problems)
    if flags.units:
        check_units(flags.units, config)
