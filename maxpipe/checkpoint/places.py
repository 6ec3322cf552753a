"""Where checkpoints are looked at: in a directory, or in an object store. Imports no JAX."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from maxpipe.checkpoint.mirror import Mirror, open_url
from maxpipe.checkpoint.record import Record, read_record
from maxpipe.checkpoint.steps import (
    StepDirectory,
    checkpoints_of,
    committed_steps,
    step_directories,
    step_path,
)
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.storage.object_store import is_remote

CHECKPOINTS = "/checkpoints"


class Directory:
    """What a `Mirror` offers of an object store, of a directory."""

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def entries(self) -> list[StepDirectory]:
        return step_directories(self.path)

    def steps(self) -> list[int]:
        return committed_steps(self.path)

    def sizes_and_times(self) -> Iterator[tuple[StepDirectory, int, datetime]]:
        for entry in self.entries():
            try:
                size = sum(path.stat().st_size for path in entry.path.rglob("*") if path.is_file())
                time = datetime.fromtimestamp(entry.path.stat().st_mtime)
            except FileNotFoundError:
                continue  # a running training has just committed or deleted it
            yield entry, size, time

    def record(self, step: int) -> Record:
        return read_record(step_path(self.path, step))

    @contextmanager
    def local_copy(self, step: int) -> Iterator[Path]:
        yield step_path(self.path, step)


def place_of(run: str, key: str) -> Directory | Mirror:
    """The place of the steps of a run.

    Args:
      run: path or URL of its directory, or of the `checkpoints` in it.
      key: what names it in messages.

    Raises:
      ConfigError: there is no such directory, or the store cannot be read.
    """
    if is_remote(run):
        url = run.rstrip("/")
        return open_url(url if url.endswith(CHECKPOINTS) else url + CHECKPOINTS, key)
    path = checkpoints_of(Path(run))
    if not path.is_dir():
        raise ConfigError(
            Problem(key, f"there is no directory {run}; runs lie in output_dir/run_name")
        )
    return Directory(path)
