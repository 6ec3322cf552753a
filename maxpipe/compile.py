"""`python -m maxpipe.compile CONFIG.yml compile.topology=v5p:4x4x4 ...`: compiles the train step without devices.

Says what it needs on each device, what it moves and how fast it could be.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from maxpipe.config import Config, ConfigError, Problem, resolve
from maxpipe.config.cli import exit_on_config_error, parse_args
from maxpipe.devices.xla_flags import advice

if TYPE_CHECKING:
    from jax.sharding import Mesh

FITS, DOES_NOT_FIT = 0, 3


@exit_on_config_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code: 0 fits, 2 configuration error, 3 does not fit.

    Of separate programs 0 says that each of them fits, not all that a stage holds at once.
    """
    arguments = parse_args(
        argv,
        prog="python -m maxpipe.compile",
        description=__doc__.splitlines()[-1],
        add_flags=_add_flags,
    )
    loaded = arguments.loaded
    if not loaded.config.compile.topology:
        example = "compile.topology=v5p:4x4x4, or cpu for simulated devices"
        raise ConfigError(
            Problem("compile.topology", f"name the devices to compile for, such as {example}")
        )
    if loaded.config.compile.load:
        raise ConfigError(
            Problem("compile.load", "is for maxpipe.train; here compile.save=FILE stores the step")
        )
    _check_files(
        loaded.config.compile.save, {"--json": arguments.flags.json, "--hlo": arguments.flags.hlo}
    )
    # A wrong configuration must not wait for these imports.
    from maxpipe.compiling.topology import devices_of
    from maxpipe.devices.mesh import build_mesh

    devices = devices_of(loaded.config)
    slices = loaded.config.compile.num_slices
    config = resolve(loaded, len(devices), slices)
    _check_engine(config, arguments.flags)
    mesh = build_mesh(config, devices)
    if config.pipeline.engine == "mpmd":
        return _separate_programs(config, mesh, Path(arguments.flags.programs))

    from maxpipe.compiling.analysis import analyse
    from maxpipe.compiling.report import size
    from maxpipe.training.stored_step import write

    report, executable = analyse(config, loaded.config, mesh, lambda text: print(text, flush=True))
    print(*report.lines(), *advice(devices[0].platform, os.environ), sep="\n")
    _write("--json", arguments.flags.json, json.dumps(report.as_json(), indent=1) + "\n")
    _write("--hlo", arguments.flags.hlo, report.hlo)
    if config.compile.save and executable:
        count = write(config.compile.save, executable, config, mesh)
        print(
            f"stored      {config.compile.save}, {size(count)}: train with compile.load={config.compile.save}"
        )
    elif config.compile.save:
        print("stored      nothing, since the compiler gave up")
    return FITS if report.fits else DOES_NOT_FIT


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.add_argument(
        "--hlo",
        metavar="FILE",
        help="write the optimized, scheduled HLO (empty if it does not fit)",
    )
    parser.add_argument(
        "--programs", metavar="DIR", help="mpmd: write the program of every unit, sliced and as HLO"
    )


def _check_engine(config: Config, flags: argparse.Namespace) -> None:
    """Raises ConfigError for what is of one program where there are several, or the other way round."""
    if config.pipeline.engine != "mpmd":
        if flags.programs:
            message = f"is for the mpmd engine; the {config.pipeline.engine} engine has one program: --hlo FILE"
            raise ConfigError(Problem("--programs", message))
        return
    if not flags.programs:
        remedy = "use pipeline.schedule=lockstep_1f1b, which has one and no more bubble than 1f1b"
        message = f"mpmd has no train step in one program; --programs DIR writes those of its stages, or {remedy}"
        raise ConfigError(Problem("pipeline.engine", message))
    given = {"compile.save": config.compile.save, "--json": flags.json, "--hlo": flags.hlo}
    problems = [
        Problem(key, "is for a train step in one program; leave it out")
        for key, file in given.items()
        if file
    ]
    if problems:
        raise ConfigError(*problems)


def _separate_programs(config: Config, mesh: "Mesh", directory: Path) -> int:
    from maxpipe.compiling.programs import write_programs
    from maxpipe.compiling.report import size
    from maxpipe.compiling.step import OutOfMemory
    from maxpipe.devices.chips import device_memory
    from maxpipe.planning.auto_stages import choose_stages

    def say(text: str) -> None:
        print(text, flush=True)

    config = choose_stages(config, device_memory(mesh.devices.reshape(-1).tolist()), say)
    try:
        for line in write_programs(config, mesh, directory):
            say(line)
    except OSError as error:
        raise ConfigError(
            Problem("--programs", f"cannot write to {directory}: {error.strerror}")
        ) from None
    except OutOfMemory as error:
        say(
            f"{'verdict':<12}does not fit: the next computation needs {size(error.needed)} of {size(error.available)}"
        )
        return DOES_NOT_FIT
    say(
        f"{'written':<12}{directory}: what each computation reads, writes and computes (.txt), and its HLO (.hlo)"
    )
    return FITS


def _check_files(save: str, reports: dict[str, str | None]) -> None:
    """Raises ConfigError for files that the compilation, which may take long, would end without.

    Args:
      save: file that is replaced.
      reports: files that are written in place, such as /dev/stdout, by flag.
    """
    problems = []
    for key, file in {"compile.save": save, **reports}.items():
        if file and (reason := _obstacle(Path(file), is_replaced=key == "compile.save")):
            problems.append(Problem(key, f"cannot write {file}: {reason}"))
    if problems:
        raise ConfigError(*problems)


def _obstacle(path: Path, *, is_replaced: bool) -> str:
    """Why a file cannot be written; empty if it can."""
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    if path.exists() and not path.is_file() and (is_replaced or path.is_dir()):
        return "it is no regular file"
    touched = path.parent if is_replaced or not path.exists() else path
    return "" if os.access(touched, os.W_OK) else f"no permission to write to {touched}"


def _write(flag: str, file: str | None, text: str) -> None:
    if file:
        try:
            Path(file).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(Problem("", f"{flag}: cannot write: {error}")) from None


if __name__ == "__main__":
    sys.exit(main())
