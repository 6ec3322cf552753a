"""Train a model, or continue a run: `python -m maxpipe.train CONFIG.yml key=value ...`.

Exit codes: 0 done; 1 failed; 2 configuration error; 42 diverged; 75 stopped by SIGTERM and 130 by
Ctrl-C, saved; 124 hung; 134 another process was lost. After 75, 124 and 134 the same command
continues the run from its last checkpoint.
"""

if __name__ == "__main__":
    from maxpipe import ctrl_c

    ctrl_c.expect()

import argparse
import faulthandler
from collections.abc import Sequence
from dataclasses import replace

from maxpipe.comparison.sweep import add_sweep_flag, sweep
from maxpipe.config.cli import exit_on_config_error, parse_args
from maxpipe.config.rules.run import check_trains
from maxpipe.data.check import with_steps
from maxpipe.supervise.ending import run_command
from maxpipe.supervise.process import supervise_process
from maxpipe.training.inputs import check_inputs


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_sweep_flag(parser)
    parser.add_argument(
        "--verbose", "-v", action="store_true", help="list every derived value at the start"
    )


@exit_on_config_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = parse_args(
        argv,
        prog="python -m maxpipe.train",
        description="Train a language model from one YAML file.",
        add_flags=_add_flags,
    )
    loaded = replace(arguments.loaded, verbose=arguments.flags.verbose)
    config = loaded.config
    check_trains(config)
    if arguments.flags.sweep:
        return sweep(loaded, arguments.flags)
    loaded = with_steps(loaded)
    with supervise_process(config.telemetry) as supervision:
        check_inputs(loaded)
        # JAX and everything built on it are imported here, once the configuration is known good.
        from maxpipe.builder import build_trainer
        from maxpipe.training.start import launch

        return launch(loaded, supervision, build_trainer)


if __name__ == "__main__":
    # Shows what Python was doing if JAX aborts because another process was lost.
    faulthandler.enable()
    run_command(main)
