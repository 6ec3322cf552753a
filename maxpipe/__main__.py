"""Run the commands under one name: `maxpipe COMMAND ...` or `python -m maxpipe COMMAND ...`.

`maxpipe train` is `python -m maxpipe.train`, and so on. Each command prints its own help.
"""

import difflib
import runpy
import sys
from collections.abc import Sequence

import maxpipe
from maxpipe import ctrl_c

COMMANDS = {
    "train": "train a model, or continue a run",
    "supervise": "start a run again when a process or host of it is lost",
    "plan": "choose mesh, schedule and memory for a model on given chips",
    "compile": "compile the train step ahead of time: memory, collectives, bounds",
    "schedule": "draw, price and compare pipeline schedules",
    "generate": "write text with a trained model",
    "evaluate": "evaluate a trained model on tasks of lm-eval",
    "runs": "ls, show, compare and draw runs",
    "tokenize": "train a tokenizer, or encode texts into token files",
    "export": "write a checkpoint for Hugging Face transformers",
    "data": "show what the model reads, or check all of it",
    "checkpoint": "list, verify and show checkpoints",
    "from_maxtext": "translate a MaxText configuration",
}
USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names, and return its exit code."""
    words = [*(sys.argv[1:] if argv is None else argv)]
    if words and words[0] in COMMANDS:
        ctrl_c.expect()  # here, since an installed `maxpipe` imports this file and calls `main`
        module = f"maxpipe.{words[0]}"
        sys.argv = [f"python -m {module}", *words[1:]]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return end.code or 0
            raise
        return 0
    if words == ["--version"]:
        print(f"maxpipe {maxpipe.__version__}")
        return 0
    asks_for_help = not words or words[0] in ("-h", "--help")
    stream = sys.stdout if asks_for_help else sys.stderr
    if not asks_for_help:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        guess = f"; did you mean {near[0]}?" if near else ""
        print(f"maxpipe: there is no command {words[0]!r}{guess}", file=stream)
    lines = [f"  {name:<14}{text}" for name, text in COMMANDS.items()]
    print("usage: maxpipe COMMAND ...", "", "commands:", *lines, sep="\n", file=stream)
    print("\n`maxpipe COMMAND --help` tells more about one.", file=stream)
    return 0 if asks_for_help else USAGE


if __name__ == "__main__":
    sys.exit(main())
