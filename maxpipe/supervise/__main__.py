"""Keep a run going: `python -m maxpipe.supervise -- python -m maxpipe.train CONFIG.yml ...`.

Starts the command, and starts it again after exit codes 75, 124 and 134 and after death by a
signal, at most `--max-restarts` times in a row, with growing pauses. Passes SIGTERM and Ctrl-C on,
waits, and ends with the command's exit code. With several hosts or processes, one supervisor per
process finds the others as maxpipe does; when one process ends, all are stopped and restarted
together. `--status RUN_DIR` shows a supervised run.
"""

if __name__ == "__main__":
    from maxpipe import ctrl_c

    ctrl_c.expect()

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from maxpipe.checkpoint.steps import committed_steps
from maxpipe.comparison.recorded import METRICS, last_step
from maxpipe.config.cli import check_flags, exit_on_config_error
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.terminal import emit, printable
from maxpipe.devices.cluster import find_place
from maxpipe.storage.records import Damaged, read_record
from maxpipe.supervise.council import Policy, Status
from maxpipe.supervise.progress import STATUS_FILE
from maxpipe.supervise.supervisor import supervise
from maxpipe.telemetry.writers import unsaved_rows

SILENT_SECONDS = 20.0


@exit_on_config_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Supervise a command or show a status, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:end])
    check_flags(options, "status")
    command = words[end + 1 :]
    if options.status:
        for line in status(Path(options.status)):
            print(printable(line))
        return 0
    if not command:
        usage = "maxpipe supervise -- python -m maxpipe.train CONFIG.yml key=value ..."
        raise ConfigError(Problem("", f"what to supervise is missing: {usage}"))
    policy = Policy(options.max_restarts, options.pause, options.wait)
    return supervise(command, find_place(), policy, _log)


def status(run: Path) -> list[str]:
    """Return lines on a supervised run: state, members, step, last checkpoint, restarts.

    Raises:
      ConfigError: no supervisor has written to the run's directory.
    """
    file = run / STATUS_FILE
    try:
        known, silent = read_record(file, Status), time.time() - file.stat().st_mtime
    except (Damaged, FileNotFoundError):
        message = (
            f"no supervisor has written {file}, or it is damaged: RUN_DIR is "
            "<output_dir>/<run_name> of a run under maxpipe supervise"
        )
        raise ConfigError(Problem("--status", message)) from None
    state = known.state
    has_ended = state.startswith("has ended")
    if silent > SILENT_SECONDS and not has_ended:
        state = f"unknown: its supervisor has been silent for {silent:.0f} s"
    steps = committed_steps(run / "checkpoints")
    step: int | str = last_step(run / METRICS)
    if (apart := unsaved_rows(run / METRICS)).exists():
        step = last_step(apart) or "none since it went back"
    last_end = f"; the last attempt: {known.last_end}" if known.last_end else ""
    members = [
        f"{index} on {host}" + " (waits)" * (index in known.waiting)
        for index, host in sorted(known.members.items())
    ]
    return [
        f"run         {run} {state}" if has_ended else f"run         {run}: {state}",
        f"processes   {', '.join(members)}",
        f"step        {step}",
        f"checkpoint  {max(steps, default='none')}",
        f"restarts    {known.restarts}{last_end}",
    ]


def _log(text: str) -> None:
    emit(printable(f"{time.strftime('%H:%M:%S')} supervise: {text}"), sys.stderr)


def _parser() -> argparse.ArgumentParser:
    policy = Policy()
    parser = argparse.ArgumentParser(
        prog="python -m maxpipe.supervise",
        description="Keep a training run going over losses of processes and hosts.",
        usage="%(prog)s [options] -- COMMAND ...\n       %(prog)s --status RUN_DIR",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--status", metavar="RUN_DIR", help="show members, step, last checkpoint and restarts")
    text = "in a row; an attempt of half an hour begins a new one (default: %(default)s)"
    add(
        "--max-restarts", type=_at_least_0(int), default=policy.max_restarts, metavar="N", help=text
    )
    text = "before the first restart, doubled for each that follows (default: %(default)g)"
    add(
        "--pause",
        type=_at_least_0(float),
        default=policy.pause_seconds,
        metavar="SECONDS",
        help=text,
    )
    text = "for supervisors of other hosts to come, or to come back (default: %(default)g)"
    add(
        "--wait", type=_at_least_0(float), default=policy.wait_seconds, metavar="SECONDS", help=text
    )
    return parser


def _at_least_0(kind: type[int] | type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        with suppress(ValueError):
            if 0 <= (number := kind(text)) < math.inf:
                return number
        raise argparse.ArgumentTypeError(f"{text} is no {kind.__name__} of at least 0")

    return parse


if __name__ == "__main__":
    sys.exit(main())
