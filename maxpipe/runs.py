"""List, show, compare and draw runs: `python -m maxpipe.runs ls|show|compare|plot DIR...`.

A DIR is the directory of a run, or one with runs below it. The runs may still be running. Exit
codes: 0; 2 if the command line is wrong or there is no run.
"""

if __name__ == "__main__":
    from maxpipe import ctrl_c

    ctrl_c.expect()

import argparse
import os
import sys
from collections.abc import Sequence

from maxpipe.comparison.page import page_html
from maxpipe.comparison.recorded import read_runs
from maxpipe.comparison.table import comparison_text, run_text, runs_text
from maxpipe.config.cli import check_flags, exit_on_config_error
from maxpipe.config.errors import ConfigError, Problem, redacted
from maxpipe.config.imports import import_variants
from maxpipe.config.outputs import unwritable, write_file


@exit_on_config_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    flags = _parser().parse_args(argv)
    if flags.action == "plot":
        check_flags(flags, "html")
    import_variants(())
    runs = read_runs(flags.directories)
    if flags.action == "compare" and len(runs) < 2:
        message = f"{runs[0].root} is one run; name another, or a directory of several"
        raise ConfigError(Problem("DIR", message))
    if flags.action == "plot":
        if reason := unwritable(flags.html):
            raise ConfigError(Problem("--html", f"cannot write {flags.html}: {reason}"))
        earlier = ", in place of an earlier file" if os.path.exists(flags.html) else ""
        write_file("--html", flags.html, redacted(page_html(runs)))
        print(f"wrote {flags.html}{earlier}", file=sys.stderr)
    elif flags.action == "show":
        print(redacted("\n".join(run_text(run) for run in runs)), end="")
    else:
        text = comparison_text(runs) if flags.action == "compare" else runs_text(runs)
        print(redacted(text), end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m maxpipe.runs",
        description="List, show, compare and draw runs.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    helps = {
        "ls": "a line for each run: step, losses, tokens per second, MFU",
        "show": "everything about each run, with its configuration",
        "compare": "a line for each run, and the keys in which their configurations differ",
        "plot": "curves of all runs on one HTML page, which needs no network",
    }
    for action, text in helps.items():
        inner = actions.add_parser(action, help=text, description=text, allow_abbrev=False)
        inner.add_argument(
            "directories",
            nargs="*" if action == "ls" else "+",
            default=["runs"] if action == "ls" else None,
            metavar="DIR",
            help="a run's directory, or one with runs below it"
            + ("; default: runs" if action == "ls" else ""),
        )
        if action == "plot":
            inner.add_argument(
                "--html", default="runs.html", metavar="FILE", help="default: %(default)s"
            )
    return parser


if __name__ == "__main__":
    ctrl_c.run(main)
