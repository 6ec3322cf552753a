"""Choose mesh, schedule and memory for a model on given chips, and prove the choice by compiling.

python -m maxpipe.plan configs/models/llama3-70b.yml --topology v5p:4x4x8 --tokens-per-step 4Mi
"""

if __name__ == "__main__":
    from maxpipe import ctrl_c

    ctrl_c.expect()

import argparse
import sys
from collections.abc import Sequence

from maxpipe.config.cli import exit_on_config_error, number_flag, parse_args
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import install_command, is_installed
from maxpipe.config.options import OPTIONS
from maxpipe.config.values import Scalar, convert
from maxpipe.plan.search.machine import Machine
from maxpipe.plan.search.request import request_of
from maxpipe.plan.search.space import BATCH, UNDECIDED

EXAMPLE = "python -m maxpipe.plan"
FINALISTS = 3  # compiled by default


@exit_on_config_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    It is 0 if something fits, 2 for a mistake in configuration, topology or flags, and 3 if nothing
    fits.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]
    arguments = parse_args(
        words,
        prog=EXAMPLE,
        description="Choose mesh, schedule and memory for a model on given chips.",
        add_flags=_add_flags,
        undecided=UNDECIDED,
    )
    request = request_of(arguments)
    arguments.flags.compile = number_compiled(arguments.flags.compile, request.machine)
    # JAX, which reads the model, is imported here, once all input is known to be good.
    from maxpipe.compile.plan_launch import launch

    return launch(request, arguments.flags, words)


def number_compiled(given: int | None, machine: Machine) -> int:
    """Return how many rows are compiled for the devices of a plan.

    Raises:
      ConfigError: rows are to be compiled, and there is no compiler.
    """
    count = FINALISTS if given is None else given
    if given and not machine.is_compilable:
        missing = f"there is no compiler at hand for {machine.topology}; leave it out"
        raise ConfigError(Problem("--compile", missing))
    if count and machine.is_compilable and not is_installed("libtpu"):
        remedy = f"{install_command('tpu')}; --no-compile plans by closed forms"
        raise ConfigError(Problem("--compile", f"needs libtpu: {remedy}"))
    return count


def _share(text: str) -> float:
    share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"expected a share below 100%, such as 10%; got {text!r}")
    return share


def _count(text: str) -> int:
    try:
        return int(str(convert(OPTIONS[BATCH], Scalar(text))))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "v5p:4x4x8 or v5p-256, cpu:8, H100:8; with --smallest a kind, v5p; default: the "
    add("--topology", metavar="SLICE", help=f"{text}configuration's compile.topology")
    text = "tokens of a step, such as 4Mi; default: the configuration's batch"
    add("--tokens-per-step", type=_count, metavar="N", help=text)
    text = "try larger batches, too, by doubling up to N sequences, at most 1024 times the batch; "
    text += "ranked by seconds a sequence"
    add("--max-global-batch", type=_count, metavar="N", help=text)
    text = "leave a key no choice, or set one that is not searched; candidates that cannot have "
    text += "the value, as meshes without stages have no schedule, are left out and counted"
    add("--fix", action="append", default=[], metavar="key=value", help=text)
    text = "try these values of a searched key, and no others; engines that do not take the key "
    text += "are tried as well"
    add("--try", action="append", default=[], dest="tried", metavar="key=a,b", help=text)
    text = "share of a device's memory that closed forms leave free (10%%)"
    add("--memory-margin", type=_share, metavar="SHARE", help=text)
    text = "compile N of the best for the slice and rank them by the compiler's estimates (3)"
    add("--compile", type=number_flag(int, 0), metavar="N", help=text)
    text = "closed forms alone"
    add("--no-compile", action="store_const", const=0, dest="compile", help=text)
    text = "put the configuration as it is into the table, and compile it after the others"
    add("--compare", action="store_true", help=text)
    text = "find the smallest slice of a kind that trains the model, and what larger ones cost"
    add("--smallest", action="store_true", help=text)
    add("--write", metavar="FILE.yml", help="write the chosen configuration")
    add("--json", metavar="FILE", help="write up to 100 rows as JSON")
    add("--html", metavar="FILE.html", help="write a page with pictures")


if __name__ == "__main__":
    ctrl_c.run(main)
