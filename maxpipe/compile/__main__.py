"""Compile the train step: `maxpipe.compile CONFIG.yml compile.topology=v5p:4x4x4 ...`.

No device is needed. Prints what the step needs on each device, what it moves and how fast it could
be.
"""

if __name__ == "__main__":
    from maxpipe import ctrl_c

    ctrl_c.expect()

import argparse
from collections.abc import Sequence

from maxpipe.compile.checks import check_command
from maxpipe.config.cli import exit_on_config_error, parse_args


@exit_on_config_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 if the step fits, 2 for a configuration error, 3 if it does not."""
    arguments = parse_args(
        argv,
        prog="python -m maxpipe.compile",
        description="Print what a train step needs, what it moves and how fast it could be.",
        add_flags=_add_flags,
    )
    check_command(arguments)
    # JAX and everything built on it are imported here, once the configuration is known good.
    from maxpipe.builder import build_trainer
    from maxpipe.compile.launch import launch
    from maxpipe.training.stored_step import write

    return launch(arguments.loaded, arguments.flags, build_trainer, write)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.add_argument(
        "--hlo",
        metavar="FILE",
        help="write the optimized, scheduled HLO (empty if it does not fit)",
    )
    parser.add_argument(
        "--profile",
        metavar="FILE.html",
        help="TPUs: write where the predicted step goes, as a page with a timeline",
    )
    parser.add_argument(
        "--profile-trace",
        metavar="FILE.json.gz",
        help="TPUs: write the predicted step as a trace for Perfetto; FILE.json is not compressed",
    )
    parser.add_argument(
        "--programs",
        metavar="DIR",
        help="mpmd: write the program of every unit, sliced and as HLO, and remove those of an "
        "earlier call",
    )
    parser.add_argument(
        "--units", metavar="F1,B1", help="mpmd: compile these units alone, each with its time"
    )


if __name__ == "__main__":
    ctrl_c.run(main)
