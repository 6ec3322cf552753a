"""`python -m maxpipe.export RUN_DIR --hf DIR`: write a checkpoint for Hugging Face transformers.

`--safetensors FILE` writes it under maxpipe's own names into one file. The command reads a
checkpoint of any run, whatever its layout over devices, and needs no accelerator. Exit codes: 0;
1 if the checkpoint cannot be read; 2 if the command line is wrong or no type of model fits; 130
after Ctrl-C.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from maxpipe.checkpoint.run_argument import add_run_arguments, check_block, find_step
from maxpipe.config.cli import exit_on_config_error
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import import_variants
from maxpipe.config.sections.model import DTYPES
from maxpipe.supervision.signals import INTERRUPTED

if TYPE_CHECKING:
    from maxpipe.checkpoint.record import Record
    from maxpipe.checkpoint.steps import StepStore
    from maxpipe.config.sections import Config
    from maxpipe.data.tokenizers import Tokenizer

DONE, NOT_READ = 0, 1  # exit codes
FILE_SIZE = 5.0  # GB


@exit_on_config_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = _parser()
    flags = parser.parse_args(argv)
    if flags.safetensors and (flags.type or flags.file_size):
        parser.error("--type and --file-size are for --hf; --safetensors writes one file")
    import_variants(flags.imports)
    os.environ["JAX_PLATFORMS"] = "cpu"  # reading takes no accelerator from a run
    try:
        # Imports JAX, for which a wrong command line should not wait.
        return _export(flags)
    except KeyboardInterrupt:
        print(flush=True)
        return INTERRUPTED


def _export(flags: argparse.Namespace) -> int:
    from pathlib import Path

    from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointUnreadable
    from maxpipe.checkpoint.mirror import open_steps
    from maxpipe.config.load import from_record
    from maxpipe.data.tokenizers import TOKENIZER
    from maxpipe.hf.exporter import export
    from maxpipe.hf.model_types import choose_family
    from maxpipe.hf.origin import ORIGIN, origin_of
    from maxpipe.hf.single_file import export_file
    from maxpipe.training.continuity import version_of

    store = open_steps(flags.run_dir, "RUN_DIR")
    step = find_step(store, flags.step)
    try:
        record = store.record(step)
        config = from_record(record.meta["config"])
        check_block(config)
        dtype = flags.dtype or config.model.param_dtype
        if flags.safetensors:
            target = Path(flags.safetensors)
            with store.local_copy(step) as directory:
                count = export_file(directory, record, config, target, dtype)
            print(f"{target}: step {step}, {count} tensors")
            return DONE
        target = Path(flags.hf)
        with store.local_files(TOKENIZER) as companions, store.local_files(ORIGIN) as kept:
            origin = origin_of(config, kept)
            family = choose_family(config, flags.type, origin)
            with store.local_copy(step) as directory:
                names = export(
                    directory,
                    record,
                    config,
                    target,
                    family=family,
                    dtype=dtype,
                    file_bytes=int((flags.file_size or FILE_SIZE) * 1e9),
                    companions=companions,
                    origin=origin,
                    tokenizer=_tokenizer_of(config, record, store),
                    version=version_of(record.meta),
                )
    except OSError as error:
        flag, place = (
            ("--safetensors", flags.safetensors) if flags.safetensors else ("--hf", flags.hf)
        )
        message = f"cannot write to {place}: {error.strerror or error}"
        raise ConfigError(Problem(flag, message)) from None
    except (CheckpointDamaged, CheckpointUnreadable) as error:
        print(f"error: {store}/{step}: {error}", file=sys.stderr)
        return NOT_READ
    print(f"{target}: step {step} as {family.model_type}: {', '.join(names)}")
    if not any(name.startswith("tokenizer") for name in names):
        source = f"data.tokenizer={config.data.tokenizer}"
        print(f"no tokenizer is written: the run has no files of {source}")
    return DONE


def _tokenizer_of(config: "Config", record: "Record", store: "StepStore") -> "Tokenizer | None":
    """Return the tokenizer of a run, None if it is not there any more, which is said."""
    from maxpipe.generation.launch import find_tokenizer

    try:
        return find_tokenizer(None, config, record.meta, store)
    except ConfigError as error:
        reason = error.problems[0].message
        print(f"warning: the ids of special tokens are not known: {reason}", file=sys.stderr)
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m maxpipe.export",
        description="Write a checkpoint for Hugging Face transformers.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_run_arguments(parser)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--hf", metavar="DIR", help="the new directory, for transformers")
    target.add_argument(
        "--safetensors", metavar="FILE", help="the new file, with maxpipe's own names"
    )
    add("--dtype", choices=DTYPES, help="of the tensors; default: model.param_dtype of the run")
    add(
        "--type",
        default="",
        metavar="TYPE",
        help="with --hf: model_type; default: the imported one, else the first that fits",
    )
    add(
        "--file-size",
        type=float,
        metavar="GB",
        help=f"with --hf: largest size of a file of weights; default {FILE_SIZE:g}",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
