"""Check the files that `maxpipe.compile` is to write, before it compiles anything.

Compiling may take long, and this needs no JAX.
"""

import gzip
from collections.abc import Mapping

from maxpipe.compile.prediction.constants import constants_of
from maxpipe.config.cli import Arguments
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.outputs import is_device, output_problems
from maxpipe.config.slices import canonical_topology
from maxpipe.devices.chips import CHIPS, chip_of

SAVE = "compile.save"
GZIPPED = ".json.gz"
ENDINGS = {"--profile": (".html",), "--profile-trace": (GZIPPED, ".json")}


def check_files(arguments: Arguments) -> None:
    """Check that each file can be written, is named once and has the ending of its content.

    Args:
      arguments: arguments of `maxpipe.compile`. The file of compile.save is replaced; others are
        written in place, such as /dev/stdout.

    Raises:
      ConfigError: a file cannot be written, has another ending, is named twice or is one that the
        configuration reads; or a profile is requested, and the topology has no prediction.
    """
    keys, flags = arguments.loaded.config.compile, arguments.flags
    files = {
        SAVE: keys.save,
        "--json": flags.json,
        "--hlo": flags.hlo,
        "--profile": flags.profile,
        "--profile-trace": flags.profile_trace,
    }
    problems = [*output_problems(files, arguments.files, {SAVE})]
    refused = {problem.key for problem in problems}
    given = {key: file for key, file in files.items() if file}
    problems += _endings({key: file for key, file in given.items() if key not in refused})
    profiles = [key for key in ENDINGS if key in given]
    if profiles and (reason := unpredictable(keys.topology)):
        problems += [Problem(key, reason) for key in profiles]
    if problems:
        raise ConfigError(*problems)


def packed_trace(file: str, trace: bytes) -> bytes:
    """Return a trace as the ending of its file says: plain JSON, or gzipped."""
    return trace if file.endswith(".json") else gzip.compress(trace, mtime=0)


def _endings(given: Mapping[str, str]) -> list[Problem]:
    problems = []
    for key, endings in ENDINGS.items():
        file = given.get(key, "")
        if file and not is_device(file) and not file.endswith(endings):
            message = f"writes {' or '.join(endings)}, which {file} does not end in"
            problems.append(Problem(key, message))
    return problems


def unpredictable(topology: str) -> str:
    """Return why steps on a topology are not predicted; empty if they are."""
    if topology == "cpu":
        return "needs the estimates of a TPU's compiler; use compile.topology=v5p:2x2x2 or such"
    chip = chip_of(canonical_topology(topology))
    if chip and constants_of(chip):
        return ""
    name = chip.name if chip else topology
    reason = f"the clock of {name} is unpublished" if chip else f"{name} is in no table of chips"
    predicted = ", ".join(c.name for c in CHIPS if c.torus and constants_of(c))
    return f"needs a predicted step, and {reason}; there are predictions for {predicted}"
