"""Keep a run going: `python -m maxpipe.supervise -- python -m maxpipe.train CONFIG.yml ...`.

Starts the command, and again after exit codes 75, 124 and 134 and after death by a signal. With
several hosts or processes, one supervisor per process finds the others as maxpipe does; when one
process ends, all are restarted together. `--status RUN_DIR` shows a supervised run.
"""

if __name__ == "__main__":
    from maxpipe import ctrl_c

    ctrl_c.expect()

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from maxpipe.checkpoint.steps import committed_steps
from maxpipe.comparison.recorded import METRICS, last_step
from maxpipe.config.cli import check_flags, exit_on_config_error, number_flag
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.terminal import emit, printable
from maxpipe.devices.cluster import find_place
from maxpipe.storage.records import Damaged, read_record
from maxpipe.supervise.council import Policy, Status
from maxpipe.supervise.process import STATUS_FILE
from maxpipe.supervise.supervisor import supervise
from maxpipe.telemetry.writers import unsaved_rows

SILENT_SECONDS = 20.0


@exit_on_config_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Supervise a command or show a status, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    options, command = _parser().parse_args(words[:end]), words[end + 1 :]
    check_flags(options, "status")
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
    """Return lines on a supervised run; ConfigError if no supervisor has written there."""
    file = run / STATUS_FILE
    try:
        known, silent = read_record(file, Status), time.time() - file.stat().st_mtime
    except (Damaged, FileNotFoundError):
        message = f"no supervisor has written {file}, or it is damaged: RUN_DIR is "
        message += "<output_dir>/<run_name> of a run under maxpipe supervise"
        raise ConfigError(Problem("--status", message)) from None
    state = known.state
    has_ended = state.startswith("has ended")
    if silent > SILENT_SECONDS and not has_ended:
        state = f"unknown: its supervisor has been silent for {silent:.0f} s"
    step: int | str = last_step(run / METRICS)
    if (apart := unsaved_rows(run / METRICS)).exists():
        step = last_step(apart) or "none since it went back"
    last_end = f"; the last attempt: {known.last_end}" if known.last_end else ""
    return [
        f"run         {run}{':' * (not has_ended)} {state}",
        f"processes   {', '.join(f'{i} on {host}' for i, host in sorted(known.members.items()))}",
        f"step        {step}",
        f"checkpoint  {max(committed_steps(run / 'checkpoints'), default='none')}",
        f"restarts    {known.restarts}{last_end}",
    ]


def _log(text: str) -> None:
    emit(printable(f"{time.strftime('%H:%M:%S')} supervise: {text}"), sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m maxpipe.supervise",
        description="Keep a training run going over losses of processes and hosts.",
        usage="%(prog)s [options] -- COMMAND ...\n       %(prog)s --status RUN_DIR",
        allow_abbrev=False,
    )
    text = "show members, step, last checkpoint and restarts"
    parser.add_argument("--status", metavar="RUN_DIR", help=text)
    restarts, pause, wait = Policy()
    for flag, kind, default, unit, text in (
        ("--max-restarts", int, restarts, "N", "in a row; half an hour of training begins anew"),
        ("--pause", float, pause, "SECONDS", "before the first restart, then doubled each time"),
        ("--wait", float, wait, "SECONDS", "for supervisors of other hosts to come, or come back"),
    ):
        text += " (default: %(default)g)"
        number = number_flag(kind, 0)
        parser.add_argument(flag, type=number, default=default, metavar=unit, help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
