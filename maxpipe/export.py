"""Write a checkpoint for Hugging Face transformers: `maxpipe.export RUN_DIR --hf DIR`.

`--safetensors FILE` writes it under maxpipe's own names into one file. Adapters (`model.lora`) are
merged; `--adapter DIR` writes them alone, for PEFT. The command reads a checkpoint of any run,
whatever its layout over devices, and needs no accelerator. Exit codes: 0; 1 if the checkpoint
cannot be read; 2 if the command line is wrong or no model type fits; 130 after Ctrl-C.
"""

if __name__ == "__main__":
    from maxpipe import ctrl_c

    ctrl_c.expect()

import argparse
import os
from collections.abc import Sequence

from maxpipe.checkpoint.run_argument import find_checkpoint, run_parser
from maxpipe.config.cli import check_flags, exit_on_config_error
from maxpipe.config.imports import import_variants
from maxpipe.config.outputs import check_local
from maxpipe.config.sections.model import DTYPES

FILE_SIZE = 5.0  # GB


@exit_on_config_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = _parser()
    flags = parser.parse_args(argv)
    check_flags(flags, "hf", "safetensors", "adapter")
    if flags.safetensors and (flags.type or flags.file_size):
        parser.error("--type and --file-size are for --hf; --safetensors writes one file")
    if flags.adapter and flags.file_size:
        parser.error("--file-size is for --hf; --adapter writes one file of weights")
    flags.file_size = flags.file_size or FILE_SIZE
    for name in ("hf", "safetensors", "adapter"):
        check_local(f"--{name}", getattr(flags, name) or "")
    import_variants(flags.imports)
    os.environ["JAX_PLATFORMS"] = "cpu"  # reading takes no accelerator from a run
    checkpoint = find_checkpoint(flags)
    # Imports JAX, which errors of the command line should not wait for.
    from maxpipe.training.export import launch

    return launch(flags, *checkpoint)


def _parser() -> argparse.ArgumentParser:
    parser = run_parser("export", "Write a checkpoint for Hugging Face transformers.")
    add = parser.add_argument
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--hf", metavar="DIR", help="the new directory, for transformers")
    target.add_argument(
        "--safetensors", metavar="FILE", help="the new file, with maxpipe's own names"
    )
    target.add_argument("--adapter", metavar="DIR", help="the new directory, for PEFT")
    add("--dtype", choices=DTYPES, help="of the tensors; default: model.param_dtype of the run")
    add(
        "--type",
        default="",
        metavar="TYPE",
        help="model_type of --hf, --adapter; default: the imported one, else the first that fits",
    )
    add(
        "--file-size",
        type=float,
        metavar="GB",
        help=f"with --hf: largest size of a file of weights; default {FILE_SIZE:g}",
    )
    return parser


if __name__ == "__main__":
    ctrl_c.run(main)
