"""Looks at checkpoints: `python -m maxpipe.checkpoint ls|verify|show DIR`.

DIR is a run directory or its `checkpoints`. Nothing is written and no accelerator is touched.
Exit codes: 0; 1 if `verify` or `show` met damage; 2 if there is nothing to look at; 3 if there was no damage, but
something cannot be read here, since a newer version wrote it or permission is missing.
"""

import argparse
import math
import os
import signal
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import yaml

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointUnreadable
from maxpipe.checkpoint.record import read_record
from maxpipe.checkpoint.steps import checkpoints_of, committed_steps, step_directories, step_path

DAMAGE = 1
NOTHING = 2
UNREADABLE = 3


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand and returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return _look(options)
    except PermissionError as error:
        print(error, file=sys.stderr)
        return UNREADABLE


def _look(options: argparse.Namespace) -> int:
    directory = checkpoints_of(options.dir)
    if not directory.is_dir():
        return _nothing(f"{directory} is not a directory")
    if not step_directories(directory):
        return _nothing(f"{directory} holds no checkpoints")
    if options.command == "ls":
        return list_steps(directory)
    steps = committed_steps(directory)
    step = getattr(options, "step", None)
    if step is not None and step not in steps:
        return _nothing(f"step {step} is not committed in {directory}; there are {steps}")
    if not steps:
        return _nothing(f"{directory} holds no committed checkpoint")
    if options.command == "verify":
        return verify(directory, steps)
    return show(directory, steps[-1] if step is None else step)


def list_steps(directory: Path) -> int:
    """Prints step, state, size and time of every step directory."""
    rows = [("step", "state", "size", "written", "name")]
    for entry in step_directories(directory):
        try:
            size = sum(path.stat().st_size for path in entry.path.rglob("*") if path.is_file())
            written = datetime.fromtimestamp(entry.path.stat().st_mtime).isoformat(" ", "seconds")
        except FileNotFoundError:
            continue  # a running training has just committed or deleted it
        rows.append((str(entry.step), entry.state, _size_text(size), written, entry.path.name))
    print(_table(rows))
    return 0


def verify(directory: Path, steps: list[int]) -> int:
    """Reads every committed step, compares all digests, and prints a verdict for each."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from maxpipe.checkpoint.reader import verify_step

    code = 0
    for step in steps:
        path = step_path(directory, step)
        try:
            verdict = f"sound, {len(verify_step(path).leaves)} arrays"
        except CheckpointUnreadable as error:
            verdict = f"UNREADABLE: {error}"
            code = code or UNREADABLE
        except CheckpointDamaged as error:
            if path.is_dir():
                verdict = f"DAMAGED: {error}"
                code = DAMAGE
            else:
                verdict = "gone: a running training has just deleted it"
        print(f"{step}: {verdict}", flush=True)
    return code


def show(directory: Path, step: int) -> int:
    """Prints what a step says about itself: the caller's meta as YAML, then a table of its arrays."""
    try:
        record = read_record(step_path(directory, step))
    except CheckpointDamaged as error:
        print(f"{step}: DAMAGED: {error}", file=sys.stderr)
        return DAMAGE
    except CheckpointUnreadable as error:
        print(f"{step}: UNREADABLE: {error}", file=sys.stderr)
        return UNREADABLE
    print(yaml.safe_dump({"step": record.step, **record.meta}, sort_keys=False, default_flow_style=None))
    rows = [("array", "dtype", "shape", "elements", "digest")]
    for name, leaf in record.leaves.items():
        shape = "x".join(map(str, leaf.shape)) or "scalar"
        rows.append((name, leaf.dtype, shape, f"{math.prod(leaf.shape):,}", f"{leaf.digest:08x}"))
    print(_table(rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m maxpipe.checkpoint", description="Look at checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("ls", "list steps: state, size, time"),
        ("verify", "read every committed step and compare digests; exit code 1 if one is damaged, 3 if unreadable"),
        ("show", "configuration, versions and arrays of one step"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("dir", type=Path, metavar="DIR", help="run directory, or its checkpoints")
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
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `show DIR | head` ends like any other filter
    sys.exit(main())
