"""Parse the command line of commands that read a run, and find the run. Imports no JAX."""

import argparse
from pathlib import Path

from maxpipe.checkpoint.mirror import open_url
from maxpipe.checkpoint.steps import CHECKPOINTS, StepsDirectory, StepStore
from maxpipe.config import Config, ConfigError, Problem
from maxpipe.config.catalog import BLOCKS, ROUTERS
from maxpipe.config.imports import add_import_flag
from maxpipe.storage.object_store import is_remote

RUN_DIR = "RUN_DIR"  # the argument, for messages


def run_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of RUN_DIR, --step, --average and --import, which is parsed as `imports`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m maxpipe.{name}", description=description, allow_abbrev=False
    )
    text = "run directory, or its checkpoints; also s3:// and gs://"
    parser.add_argument("run_dir", metavar=RUN_DIR, help=text)
    parser.add_argument(
        "--step", type=int, metavar="N", help="the checkpoint to read; default: the newest"
    )
    add_import_flag(parser)
    text = "read the mean of this many checkpoints, the last ones up to --step; default: 1"
    parser.add_argument("--average", type=int, default=1, metavar="N", help=text)
    return parser


def open_steps(run: str, key: str) -> StepStore:
    """Return the steps of a run, given by path or URL of its directory or its `checkpoints`.

    Raises PermissionError, and ConfigError if there is no such directory or the store cannot be
    read; under `key`.
    """
    if is_remote(run):
        url = run.rstrip("/")
        return open_url(url if url.endswith(f"/{CHECKPOINTS}") else f"{url}/{CHECKPOINTS}", key)
    inner, path = Path(run, CHECKPOINTS), Path(run)
    if inner.is_dir():
        return StepsDirectory(inner)
    if not path.is_dir():
        message = f"there is no directory {path}; runs lie in output_dir/run_name"
        raise ConfigError(Problem(key, message))
    if path.parent.name == CHECKPOINTS and path.name.isdigit():
        message = f"{path} is one checkpoint: name its run, {path.parents[1]}, and --step"
        raise ConfigError(Problem(key, message))
    return StepsDirectory(path)


def find_checkpoint(flags: argparse.Namespace) -> tuple[StepStore, list[int]]:
    """Return the store of the run on the command line and its steps; raises as `find_steps`."""
    store = open_steps(flags.run_dir, RUN_DIR)
    return store, find_steps(store, flags.step, flags.average)


def find_steps(store: StepStore, step: int | None, average: int) -> list[int]:
    """Return the last `average` committed steps up to `step`, in ascending order.

    Raises ConfigError if there are too few, or `step` is not committed.
    """
    last = find_step(store, step)
    steps = [saved for saved in store.steps() if saved <= last]
    if not 1 <= average <= len(steps):
        message = f"expected 1 to {len(steps)}, since {store} holds the steps {steps} up to {last}"
        remedy = f"got {average}. checkpoint.keep says how many a run keeps"
        raise ConfigError(Problem("--average", f"{message}; {remedy}"))
    return steps[-average:]


def find_step(store: StepStore, step: int | None, key: str = RUN_DIR) -> int:
    """Return `step` if it is committed, or the newest committed step if it is None.

    Raises ConfigError if there is none, under `key`, the argument that names the run.
    """
    steps = store.steps()
    if not steps:
        message = f"{store} holds no checkpoint; give output_dir/run_name of a run that saves"
        raise ConfigError(Problem(key, message))
    if step is not None and step not in steps:
        raise ConfigError(Problem("--step", f"{step} is not saved in {store}; there are {steps}"))
    return steps[-1] if step is None else step


def check_variants(config: Config) -> None:
    """Raise ConfigError if the run's block or router is unknown: its module was not imported."""
    for key, name, known in (
        ("model.block", config.model.block, BLOCKS),
        ("model.moe.router", config.model.moe.router, ROUTERS),
    ):
        if name not in known:
            remedy = "import the module that adds it, as training did: --import MODULE"
            message = f"the run has {name!r}, which is not known here; {remedy}"
            raise ConfigError(Problem(key, message))
