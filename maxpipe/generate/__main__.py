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

from maxpipe.checkpoint.run_argument import find_checkpoint, run_parser
from maxpipe.config.cli import check_flags, exit_on_config_error, number_flag
from maxpipe.config.imports import import_variants
from maxpipe.config.sections import MOST_SEED
from maxpipe.supervise.signals import INTERRUPTED


@exit_on_config_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = _parser()
    flags = parser.parse_args(argv)
    if flags.prompt is None and not flags.chat:
        parser.error("--prompt is required, or --chat")
    if flags.system and not flags.chat:
        parser.error("--system is for --chat")
    check_flags(flags, "tokenizer")
    import_variants(flags.imports)
    try:
        checkpoint = find_checkpoint(flags)
        # Imports JAX, which errors of the command line should not wait for.
        from maxpipe.generate.launch import launch

        return launch(flags, *checkpoint)
    except KeyboardInterrupt:
        print(flush=True)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = run_parser("generate", "Continue a text with a trained model, or talk to it.")
    add = parser.add_argument
    add("--prompt", type=_utf8, metavar="TEXT", help="the text to continue")
    add(
        "--chat",
        action="store_true",
        help="answer --prompt, laid out by the run's chat template; without --prompt, every line "
        "that is typed",
    )
    add("--system", type=_utf8, metavar="TEXT", help="with --chat: a system message")
    add(
        "--max-tokens",
        type=number_flag(int, 1),
        default=200,
        metavar="N",
        help="tokens at most; default %(default)s",
    )
    add("--tokenizer", metavar="PATH", help="as data.tokenizer; default: the run's own")
    add(
        "--temperature",
        type=number_flag(float, 0),
        default=0.8,
        metavar="X",
        help="below 1 favors likely tokens, 0 takes the most likely one; default %(default)s",
    )
    add(
        "--top-k",
        type=number_flag(int, 0),
        default=0,
        metavar="N",
        help="draw from this many most likely tokens; 0 = all, the default",
    )
    add(
        "--top-p",
        type=number_flag(float, 1e-6, 1),
        default=1.0,
        metavar="P",
        help="draw from the most likely tokens that together have this probability; "
        "1 = all, the default",
    )
    add(
        "--seed",
        type=number_flag(int, 0, MOST_SEED),
        default=0,
        metavar="N",
        help="of the draws; default %(default)s",
    )
    add(
        "--stop",
        type=_nonempty,
        action="append",
        default=[],
        metavar="TEXT",
        help="end after this text; may be repeated",
    )
    add(
        "--stop-token",
        type=number_flag(int, 0),
        action="append",
        default=[],
        metavar="ID",
        help="end before this token, as before the end of document; may be repeated",
    )
    return parser


def _utf8(word: str) -> str:
    """Return a word of the command line as UTF-8, even if the locale is ASCII only."""
    return os.fsencode(word).decode("utf-8", errors="replace")


def _nonempty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("is empty, which every text contains")
    return text


if __name__ == "__main__":
    ctrl_c.run(main)
