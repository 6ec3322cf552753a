"""Translate a MaxText configuration into a YAML file for `maxpipe.train`.

python -m maxpipe.from_maxtext MAXTEXT/configs/base.yml model_name=llama3-8b --devices 16 > mine.yml
python -m maxpipe.from_maxtext base.yml models/mistral-7b.yml ici_fsdp_parallelism=8 > mine.yml
"""

if __name__ == "__main__":
    from maxpipe import ctrl_c

    ctrl_c.expect()

import argparse
import shlex
import sys
from collections.abc import Sequence

from maxpipe.config.cli import exit_on_config_error
from maxpipe.config.errors import ConfigError, Problem, redacted
from maxpipe.migration.configuration import translate
from maxpipe.migration.read import read_maxtext

DESCRIPTION = """\
Translate a MaxText configuration into a YAML file for maxpipe.train.

Only the file goes to standard output; what differs or is left out is reported on standard error.
The exit code is 2, and standard output empty, if something stands in the way: all of it is listed.
"""
EPILOG = """\
model_name=llama3-8b finds the model's file in the directory models next to base.yml or one level
up, as in MaxText. Batches are sizes per device in MaxText, and totals here: the devices are those
of compile_topology, or the product of a mesh without -1, unless --devices says how many there are.
"""


@exit_on_config_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code 0, or leave with 2 if something is refused."""
    words = [*(sys.argv[1:] if argv is None else argv)]
    parser = argparse.ArgumentParser(
        prog="python -m maxpipe.from_maxtext",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="MaxText's base.yml, a model's file, and key=value, as MaxText's train takes them; "
        "keys of maxpipe, such as pipeline.num_microbatches=8, go into the result as they are",
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="devices of the run over all slices"
    )
    flags = parser.parse_intermixed_args(words)
    if not flags.words:
        raise ConfigError(Problem("", "nothing to translate; see --help"))
    if flags.devices is not None and flags.devices < 1:
        raise ConfigError(Problem("--devices", f"must be at least 1; got {flags.devices}"))
    is_file = {word: word.endswith((".yml", ".yaml")) and "=" not in word for word in flags.words}
    files = [word for word in flags.words if is_file[word]]
    overrides = [word for word in flags.words if not is_file[word]]
    translation = translate(read_maxtext(files, overrides), flags.devices or 0)
    for note in translation.notes:
        print(redacted(f"note: {note}"), file=sys.stderr)
    command = redacted(f"python -m maxpipe.from_maxtext {shlex.join(words)}")
    print("\n".join(f"# {line}" for line in command.splitlines()))
    print(translation.yaml, end="")
    return 0


if __name__ == "__main__":
    ctrl_c.run(main)
