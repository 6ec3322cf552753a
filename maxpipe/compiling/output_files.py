"""Check the files that `maxpipe.compile` is told to write, before it compiles anything.

Compiling may take long, and this needs no JAX.
"""

import argparse
import gzip
import os
from collections.abc import Mapping
from pathlib import Path

from maxpipe.compiling.prediction.constants import constants_of
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.paths import unwritable
from maxpipe.config.sections import CompileConfig
from maxpipe.config.slices import canonical_topology
from maxpipe.devices.chips import CHIPS, chip_of

SAVE = "compile.save"
GZIPPED = ".json.gz"
ENDINGS = {"--profile": (".html",), "--profile-trace": (GZIPPED, ".json")}


def check_files(keys: CompileConfig, flags: argparse.Namespace) -> None:
    """Check that each file can be written and is named once, by what it will hold.

    Args:
      keys: `compile.*`; its file is replaced, the others are written in place, such as /dev/stdout.
      flags: of the command line.

    Raises:
      ConfigError: a file cannot be written, has another ending or is named twice; or a profile is
        asked for, and the topology has no prediction.
    """
    files = {
        SAVE: keys.save,
        "--json": flags.json,
        "--hlo": flags.hlo,
        "--profile": flags.profile,
        "--profile-trace": flags.profile_trace,
    }
    given = {key: file for key, file in files.items() if file}
    problems = [
        Problem(key, f"cannot write {file}: {reason}")
        for key, file in given.items()
        if (reason := unwritable(file, is_replaced=key == SAVE))
    ]
    refused = {problem.key for problem in problems}
    writable = {key: file for key, file in given.items() if key not in refused}
    problems += [*_endings(writable), *_collisions(writable)]
    profiles = [key for key in ENDINGS if key in given]
    if profiles and (reason := _unpredictable(keys.topology)):
        problems += [Problem(key, reason) for key in profiles]
    if problems:
        raise ConfigError(*problems)


def trace_content(file: str, trace: bytes) -> bytes:
    """Return a gzipped trace as the ending of its file says: gzipped, or plain JSON."""
    return gzip.decompress(trace) if file.endswith(".json") else trace


def _endings(given: Mapping[str, str]) -> list[Problem]:
    problems = []
    for key, endings in ENDINGS.items():
        file = given.get(key, "")
        if file and not _is_device(file) and not file.endswith(endings):
            message = f"writes {' or '.join(endings)}, which {file} does not end in"
            problems.append(Problem(key, message))
    return problems


def _collisions(given: Mapping[str, str]) -> list[Problem]:
    """Return the keys whose file another one names as well."""
    problems = []
    first: dict[str, str] = {}
    for key, file in given.items():
        earlier = first.setdefault(os.path.realpath(file), key)
        if earlier != key and not _is_device(file):
            problems.append(Problem(key, f"{file} is the file of {earlier}; give another one"))
    return problems


def _is_device(file: str) -> bool:
    """Return whether a file takes what it is given without keeping it, such as /dev/stdout."""
    return Path(file).exists() and not Path(file).is_file()


def _unpredictable(topology: str) -> str:
    """Return why steps on a topology are not predicted; empty if they are."""
    if topology == "cpu":
        return "needs the estimates of a TPU's compiler; use compile.topology=v5p:2x2x2 or such"
    chip = chip_of(canonical_topology(topology))
    if chip and constants_of(chip):
        return ""
    name = chip.name if chip else topology
    reason = f"the clock of {name} is unpublished" if chip else f"{name} is in no table of chips"
    predicted = ", ".join(c.name for c in CHIPS if c.torus and constants_of(c))
    return f"shows a predicted step, and {reason}; there are predictions for {predicted}"
