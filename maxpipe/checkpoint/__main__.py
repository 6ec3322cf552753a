"""List, verify and show checkpoints: `python -m maxpipe.checkpoint ls|verify|show DIR`.

DIR is a run directory or its `checkpoints`; in an object store, the run's URL below
`checkpoint.mirror`, such as `s3://bucket/runs/base`. The command writes nothing, except that
`verify` copies mirrored steps to the temporary directory, one at a time. It uses no accelerator.
Exit codes: 0; 1 if `verify` or `show` found damage; 2 if there is nothing to show; 3 if nothing is
damaged, but something cannot be read here, because of a newer version or missing permission.
"""

if __name__ == "__main__":
    from maxpipe import ctrl_c

    ctrl_c.expect()

import argparse
import math
import os
import signal
import sys
from collections.abc import Callable

import yaml

from maxpipe.checkpoint.errors import CheckpointDamaged, ReadError
from maxpipe.checkpoint.run_argument import find_step, open_steps
from maxpipe.checkpoint.steps import StepStore
from maxpipe.config.cli import print_problems
from maxpipe.config.errors import ConfigError
from maxpipe.config.terminal import no_tracebacks
from maxpipe.render.columns import columns
from maxpipe.storage.object_store import explained, is_remote

KEY = "DIR"
DAMAGE = 1
NOTHING = 2
UNREADABLE = 3


@no_tracebacks()
def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        if not is_remote(options.dir):
            return _run(options)
        with explained(options.dir, KEY):
            return _run(options)
    except PermissionError as error:
        print(error, file=sys.stderr)
        return UNREADABLE
    except ConfigError as error:
        print_problems(error)
        return NOTHING


def _run(options: argparse.Namespace) -> int:
    store = open_steps(options.dir, KEY)
    if options.command == "ls" and store.entries():
        return list_steps(store)
    find_step(store, None, KEY)  # there is one
    if options.command == "verify":
        return verify(store, lambda: open_steps(options.dir, KEY).steps())
    return show(store, find_step(store, options.step, KEY))


def list_steps(store: StepStore) -> int:
    rows = [("step", "state", "size", "written", "name")]
    for entry, size, time in store.sizes_and_times():
        written = f"{time:%Y-%m-%d %H:%M:%S}"
        rows.append((str(entry.step), entry.state, _size_text(size), written, entry.name))
    print("\n".join(columns(rows, left=range(len(rows[0])))))
    return 0


def verify(store: StepStore, steps_now: Callable[[], list[int]]) -> int:
    """Read every committed step, compare all digests, and print a verdict for each.

    `steps_now` lists the committed steps again: a running training may delete some.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    from maxpipe.checkpoint.reader import verify_step

    code = 0
    for step in store.steps():
        try:
            with store.local_copy(step) as path:
                verdict = f"sound, {len(verify_step(path).leaves)} arrays"
        except ReadError as error:
            verdict = "gone: a running training has just deleted it"
            if step in steps_now():
                verdict, found = _verdict(error)
                code = code if code == DAMAGE else found
        print(f"{step}: {verdict}", flush=True)
    return code


def show(store: StepStore, step: int) -> int:
    """Print the record of a step: the caller's meta as YAML, then a table of its arrays."""
    try:
        record = store.record(step)
    except ReadError as error:
        verdict, code = _verdict(error)
        print(f"{step}: {verdict}", file=sys.stderr)
        return code
    description = {"step": record.step, **record.meta}
    print(yaml.safe_dump(description, sort_keys=False, default_flow_style=None, allow_unicode=True))
    rows = [("array", "dtype", "shape", "elements", "digest")]
    for name, leaf in record.leaves.items():
        shape = "x".join(map(str, leaf.shape)) or "scalar"
        rows.append((name, leaf.dtype, shape, f"{math.prod(leaf.shape):,}", f"{leaf.digest:08x}"))
    print("\n".join(columns(rows, left=range(len(rows[0])))))
    return 0


def _verdict(error: ReadError) -> tuple[str, int]:
    if isinstance(error, CheckpointDamaged):
        return f"DAMAGED: {error.reason}", DAMAGE
    return f"UNREADABLE: {error.reason}", UNREADABLE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m maxpipe.checkpoint", description="List, verify and show checkpoints."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    codes = "exit code 1 if one is damaged, 3 if unreadable"
    for name, text in (
        ("ls", "list steps: state, size, time"),
        ("verify", f"read every committed step and compare digests; {codes}"),
        ("show", "configuration, versions and arrays of one step"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        places = "run directory, or its checkpoints; also s3:// and gs://"
        command.add_argument("dir", metavar=KEY, help=places)
    command.add_argument("--step", type=int, help="default: the newest")
    return parser


def _size_text(size: int) -> str:
    power = min(size.bit_length() // 10, 4)
    return f"{size / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `show DIR | head` ends like any other filter
    ctrl_c.run(main)
