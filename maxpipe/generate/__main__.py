"""Continue a text with a trained model: `python -m maxpipe.generate RUN_DIR --prompt TEXT`.

With `--chat`, TEXT is a user's message, and the command prints the answer; without `--prompt`, it
answers each line that is typed. The command reads a checkpoint of any run, whatever its layout over
devices. Exit codes: 0; 1 if the checkpoint cannot be loaded; 2 if the command line is wrong; 130
after Ctrl-C.
"""

if __name__ == "__main__":
    from maxpipe import ctrl_c

    ctrl_c.expect()

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields

from maxpipe.checkpoint.run_argument import find_checkpoint, run_parser
from maxpipe.config.cli import check_flags, exit_on_config_error
from maxpipe.config.imports import import_variants
from maxpipe.generate.text import Options


@exit_on_config_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = _parser()
    flags = parser.parse_args(argv)
    texts = [t and os.fsencode(t).decode(errors="replace") for t in (flags.prompt, flags.system)]
    flags.prompt, flags.system = texts  # with U+FFFD for bytes that are not UTF-8
    if flags.prompt is None and not flags.chat:
        parser.error("--prompt is required, or --chat")
    if flags.system and not flags.chat:
        parser.error("--system is for --chat")
    try:
        flags.options = Options(**{f.name: getattr(flags, f.name) for f in fields(Options)})
    except ValueError as error:
        name, _, reason = str(error).partition(": ")
        parser.error(f"--{name.replace('_', '-')}: {reason}")
    check_flags(flags, "tokenizer")
    import_variants(flags.imports)
    checkpoint = find_checkpoint(flags)
    # Imports JAX, which errors of the command line should not wait for.
    from maxpipe.generate.launch import launch

    return launch(flags, *checkpoint)


def _parser() -> argparse.ArgumentParser:
    parser = run_parser("generate", "Continue a text with a trained model, or talk to it.")
    add = parser.add_argument
    add("--prompt", metavar="TEXT", help="the text to continue")
    add(
        "--chat",
        action="store_true",
        help="answer --prompt by the run's chat template; without --prompt, every line typed",
    )
    add("--system", metavar="TEXT", help="with --chat: a system message")
    add("--tokenizer", metavar="PATH", help="as data.tokenizer; default: the run's own")
    numbers = {
        "max_tokens": "tokens at most",
        "temperature": "below 1 favors likely tokens, 0 takes the most likely one",
        "top_k": "draw from this many most likely tokens; 0 = all",
        "top_p": "draw from the most likely tokens that together have this probability; 1 = all",
        "seed": "of the draws",
    }
    for name, text in numbers.items():
        default = getattr(Options, name)
        add(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            metavar="N" if isinstance(default, int) else "X",
            help=f"{text}; default: {default}",
        )
    add("--stop", action="append", default=[], metavar="TEXT", help="end after it; repeatable")
    add(
        "--stop-token",
        type=int,
        action="append",
        default=[],
        dest="stop_tokens",
        metavar="ID",
        help="end before this token, as before the end of document; repeatable",
    )
    return parser


if __name__ == "__main__":
    ctrl_c.run(main)
