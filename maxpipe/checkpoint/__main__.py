"""Looks at checkpoints: `python -m maxpipe.checkpoint ls|verify|show DIR`.

DIR is a run directory or its `checkpoints`; in an object store, `s3://bucket/runs/base`, the one
below `checkpoint.mirror`. Nothing is written, but for copies that `verify` makes of mirrored steps
in the directory for temporary files, one at a time. No accelerator is touched. Exit codes: 0; 1 if
`verify` or `show` met damage; 2 if there is nothing to look at; 3 if there was no damage, but
something cannot be read here, since a newer version wrote it or permission is missing.
"""

import argparse
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence

import yaml

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointUnreadable
from maxpipe.checkpoint.mirror import Mirror
from maxpipe.checkpoint.places import Directory, place_of
from maxpipe.config.cli import print_problems
from maxpipe.config.errors import ConfigError
from maxpipe.storage.object_store import explained, is_remote

KEY = "DIR"
DAMAGE = 1
NOTHING = 2
UNREADABLE = 3


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand and returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        if not is_remote(options.dir):
            return _look(options)
        with explained(options.dir, KEY):
            return _look(options)
    except PermissionError as error:
        print(error, file=sys.stderr)
        return UNREADABLE
    except ConfigError as error:
        print_problems(error)
        return NOTHING


def _look(options: argparse.Namespace) -> int:
    place = place_of(options.dir, KEY)
    if not place.entries():
        return _nothing(f"{place} holds no checkpoints")
    if options.command == "ls":
        return list_steps(place)
    steps = place.steps()
    step = getattr(options, "step", None)
    if step is not None and step not in steps:
        return _nothing(f"step {step} is not committed in {place}; there are {steps}")
    if not steps:
        return _nothing(f"{place} holds no committed checkpoint")
    if options.command == "verify":
        return verify(place, lambda: place_of(options.dir, KEY).steps())
    return show(place, steps[-1] if step is None else step)


def list_steps(place: Directory | Mirror) -> int:
    """Prints step, state, size and time of every step."""
    rows = [("step", "state", "size", "written", "name")]
    for entry, size, time in place.sizes_and_times():
        rows.append(
            (
                str(entry.step),
                entry.state,
                _size_text(size),
                f"{time:%Y-%m-%d %H:%M:%S}",
                entry.name,
            )
        )
    print(_table(rows))
    return 0


def verify(place: Directory | Mirror, steps_now: Callable[[], list[int]]) -> int:
    """Reads every committed step, compares all digests, and prints a verdict for each."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from maxpipe.checkpoint.reader import verify_step

    code = 0
    for step in place.steps():
        try:
            with place.local_copy(step) as path:
                verdict = f"sound, {len(verify_step(path).leaves)} arrays"
        except CheckpointUnreadable as error:
            verdict = f"UNREADABLE: {error}"
            code = code or UNREADABLE
        except CheckpointDamaged as error:
            if step in steps_now():
                verdict = f"DAMAGED: {error}"
                code = DAMAGE
            else:
                verdict = "gone: a running training has just deleted it"
        print(f"{step}: {verdict}", flush=True)
    return code


def show(place: Directory | Mirror, step: int) -> int:
    """Prints what a step says about itself: the caller's meta as YAML, then a table of its arrays."""
    try:
        record = place.record(step)
    except CheckpointDamaged as error:
        print(f"{step}: DAMAGED: {error}", file=sys.stderr)
        return DAMAGE
    except CheckpointUnreadable as error:
        print(f"{step}: UNREADABLE: {error}", file=sys.stderr)
        return UNREADABLE
    print(
        yaml.safe_dump(
            {"step": record.step, **record.meta}, sort_keys=False, default_flow_style=None
        )
    )
    rows = [("array", "dtype", "shape", "elements", "digest")]
    for name, leaf in record.leaves.items():
        shape = "x".join(map(str, leaf.shape)) or "scalar"
        rows.append((name, leaf.dtype, shape, f"{math.prod(leaf.shape):,}", f"{leaf.digest:08x}"))
    print(_table(rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m maxpipe.checkpoint", description="Look at checkpoints."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("ls", "list steps: state, size, time"),
        (
            "verify",
            "read every committed step and compare digests; exit code 1 if one is damaged, 3 if unreadable",
        ),
        ("show", "configuration, versions and arrays of one step"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "dir", metavar=KEY, help="run directory, or its checkpoints; s3:// and gs:// as well"
        )
        if name == "show":
            command.add_argument("--step", type=int, help="default: the newest")
    return parser


def _nothing(message: str) -> int:
    print(message, file=sys.stderr)
    return NOTHING


def _size_text(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `show DIR | head` ends like any other filter
    sys.exit(main())
