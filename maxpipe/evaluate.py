"""Evaluate a run on tasks of lm-eval: `python -m maxpipe.evaluate RUN_DIR --tasks NAMES`.

The command reads a checkpoint of any run, whatever its layout over devices, and prints lm-eval's
table. Exit codes: 0; 1 if the checkpoint cannot be loaded; 2 if the command line is wrong or a task
is not known; 130 after Ctrl-C.
"""

if __name__ == "__main__":
    from maxpipe import ctrl_c

    ctrl_c.expect()

import argparse
from collections.abc import Sequence
from pathlib import Path

from maxpipe.checkpoint.run_argument import find_checkpoint, run_parser
from maxpipe.config.cli import check_flags, exit_on_config_error, number_flag
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import import_variants, is_installed, optional
from maxpipe.config.outputs import unwritable


@exit_on_config_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    flags = _parser().parse_args(argv)
    check_flags(flags, "include", "tokenizer", "json")
    if flags.json and (reason := unwritable(flags.json)):
        raise ConfigError(Problem("--json", reason))
    if flags.include and not Path(flags.include).is_dir():
        raise ConfigError(Problem("--include", f"there is no directory {flags.include}"))
    import_variants(flags.imports)
    with optional("lm_eval", "eval", "--tasks"):
        if not is_installed("lm_eval"):
            raise ModuleNotFoundError(name="lm_eval")
        checkpoint = find_checkpoint(flags)
        import lm_eval  # noqa: F401  # takes seconds
    # Imports JAX, which errors of the command line should not wait for.
    from maxpipe.generate.lm_eval_model import launch

    return launch(flags, *checkpoint)


def _parser() -> argparse.ArgumentParser:
    parser = run_parser("evaluate", "Evaluate a trained model on tasks of lm-eval.")
    add = parser.add_argument
    add(
        "--tasks",
        type=lambda text: [name for name in text.split(",") if name],
        required=True,
        metavar="NAMES",
        help="tasks of lm-eval, or patterns, separated by commas, such as hellaswag,arc_*",
    )
    add("--include", metavar="DIR", help="a directory with tasks of your own, in YAML")
    add(
        "--num-fewshot",
        type=number_flag(int, 0),
        metavar="N",
        help="examples before each; default: the task's",
    )
    add("--limit", type=number_flag(int, 1), metavar="N", help="take the first N of each task only")
    add(
        "--batch-size",
        type=number_flag(int, 1),
        default=8,
        metavar="N",
        help="texts at once, whose logits are in memory as a whole; default %(default)s",
    )
    add("--tokenizer", metavar="PATH", help="as data.tokenizer; default: the run's own")
    add("--json", metavar="FILE", help="also write the results to a file")
    return parser


if __name__ == "__main__":
    ctrl_c.run(main)
