"""Choose mesh, schedule and memory for a model on given chips, and prove the choice by compiling.

python -m maxpipe.plan configs/models/llama3-70b.yml --topology v5p:4x4x8 --tokens-per-step 4Mi
"""

if __name__ == "__main__":
    from maxpipe import ctrl_c

    ctrl_c.expect()

import argparse
import sys
from collections.abc import Sequence

from maxpipe.config.cli import exit_on_config_error, parse_args
from maxpipe.config.errors import ConfigError
from maxpipe.plan.search.flags import (
    compiler_problems,
    flag_problems,
    number_compiled,
)
from maxpipe.plan.search.request import request_of
from maxpipe.plan.search.space import UNDECIDED

EXAMPLE = "python -m maxpipe.plan"


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
    flags = arguments.flags
    if problems := [*flag_problems(arguments)]:
        raise ConfigError(*problems)
    request = request_of(arguments)
    if problems := [*compiler_problems(flags, request.machine)]:
        raise ConfigError(*problems)
    flags.compile = number_compiled(flags)
    # JAX, which reads the model, is imported here, once all input is known to be good.
    from maxpipe.compile.plan_launch import launch

    return launch(request, flags, words)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--topology",
        metavar="SLICE",
        help="v5p:4x4x8 or v5p-256, cpu:8, H100:8; with --smallest a kind, v5p; default: the "
        "configuration's compile.topology",
    )
    parser.add_argument(
        "--tokens-per-step",
        metavar="N",
        help="tokens of a step, such as 4Mi; default: the configuration's batch",
    )
    parser.add_argument(
        "--max-global-batch",
        metavar="N",
        help="try larger batches, too, by doubling up to N sequences, at most 1024 times the "
        "batch; ranked by seconds a sequence",
    )
    parser.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="key=value",
        help="leave a key no choice, or set one that is not searched; candidates that cannot have "
        "the value, as meshes without stages have no schedule, are left out and counted",
    )
    parser.add_argument(
        "--try",
        action="append",
        default=[],
        dest="tried",
        metavar="key=a,b",
        help="try these values of a searched key, and no others; engines that do not take the key "
        "are tried as well",
    )
    parser.add_argument(
        "--memory-margin",
        metavar="SHARE",
        help="share of a device's memory that closed forms leave free (10%%)",
    )
    parser.add_argument(
        "--compile",
        type=int,
        metavar="N",
        help="compile N of the best for the slice and rank them by the compiler's estimates (3)",
    )
    parser.add_argument(
        "--no-compile", action="store_true", dest="closed", help="closed forms alone"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="put the configuration as it is into the table, and compile it after the others",
    )
    parser.add_argument(
        "--smallest",
        action="store_true",
        help="find the smallest slice of a kind that trains the model, and what larger ones cost",
    )
    parser.add_argument("--write", metavar="FILE.yml", help="write the chosen configuration")
    parser.add_argument("--json", metavar="FILE", help="write up to 100 rows as JSON")
    parser.add_argument("--html", metavar="FILE.html", help="write a page with pictures")


if __name__ == "__main__":
    ctrl_c.run(main)
