"""Checkpoints of a run in an object store: a copy of each step, whole or not to be seen.

The objects of a step lie below `<step>/` as its files do on disk. An object store renames nothing,
so that the commit is one small object beside them, `<step>.json`, written after all of them and
deleted before them: their names and sizes. Setting a step aside makes it `<step>.damaged.json` or
`<step>.abandoned.json`. While objects are written or deleted there is a `<step>.unfinished.json`,
which tells what a kill leaves from what another program has put there. Imports no JAX.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointUnreadable
from maxpipe.checkpoint.record import FILE, ITEM, Record, parse_record
from maxpipe.checkpoint.steps import ABANDONED, COMMITTED, DAMAGED, UNFINISHED
from maxpipe.config import Config
from maxpipe.storage.object_store import explained, open_store

KEY = "checkpoint.mirror"
FILES_AT_ONCE = 4  # each with up to ten parts of 50 MB in memory

_STATE = re.compile(rf"(0|[1-9]\d*)(?:\.({DAMAGED}|{ABANDONED}|{UNFINISHED}))?\.json")


@dataclass(frozen=True)
class MirroredStep:
    """What is in the store of one step.

    Attributes:
      step: its number.
      state: as of a `StepDirectory`.
      name: of the object that says so.
    """

    step: int
    state: str
    name: str


class Mirror:
    """The steps of one run in an object store; one process at a time may write to it.

    What is there is listed once, when the object is made; later only its own changes are known to
    it. Every method may raise whatever errors the store has.

    Args:
      url: such as `s3://bucket/runs/base/checkpoints`.
      store: the fsspec file system it belongs to.
    """

    def __init__(self, url: str, store: Any):
        self.url = url.rstrip("/")
        self._store = store
        self._names = self._list()  # replaced, never changed: other threads may be reading it

    def __str__(self) -> str:
        return self.url

    def entries(self) -> list[MirroredStep]:
        """Every step in whatever state, by step, then name."""
        matches = [match for name in self._names if (match := _STATE.fullmatch(name))]
        found = [MirroredStep(int(match[1]), match[2] or COMMITTED, match[0]) for match in matches]
        whole = {entry.step for entry in found if entry.state != UNFINISHED}
        found = [entry for entry in found if entry.state != UNFINISHED or entry.step not in whole]
        return sorted(found, key=lambda entry: (entry.step, entry.name))

    def foreign(self) -> list[str]:
        """Names of steps that no `Mirror` has written; it overwrites and deletes none of them."""
        ours = {str(entry.step) for entry in self.entries()}
        return sorted(
            (name for name in self._names if name.isdecimal() and name not in ours), key=int
        )

    def steps(self) -> list[int]:
        """Committed steps in ascending order."""
        return [entry.step for entry in self.entries() if entry.state == COMMITTED]

    def sizes_and_times(self) -> Iterator[tuple[MirroredStep, int, datetime]]:
        """Every step with its bytes, and when it came into its state."""
        for entry in self.entries():
            try:
                size = sum(
                    info["size"]
                    for info in self._store.find(self._path(str(entry.step)), detail=True).values()
                )
                time = self._store.modified(self._path(entry.name)).astimezone()
            except FileNotFoundError:
                continue  # a running training has just committed or deleted it
            yield entry, size, time

    def record(self, step: int) -> Record:
        """The record of a committed step.

        Raises:
          CheckpointDamaged, CheckpointUnreadable: as `read_record`.
        """
        try:
            data = self._store.cat_file(self._path(str(step), ITEM, FILE))
        except FileNotFoundError as error:
            raise CheckpointDamaged(f"record is missing: {error}") from error
        return parse_record(data, str(step))

    def upload(self, step: int, directory: Path) -> None:
        """Copies the committed checkpoint in `directory`; visible when all of it is there.

        Copies of the same step that were set aside are overwritten.
        """
        sizes = {
            path.relative_to(directory).as_posix(): path.stat().st_size
            for path in _files_of(directory)
        }
        former = [
            entry.name
            for entry in self.entries()
            if entry.step == step and entry.state != UNFINISHED
        ]
        self._write(f"{step}.{UNFINISHED}.json", {})
        for name in former:
            self._remove(name)
        targets = [self._path(str(step), name) for name in sizes]
        self._store.put(
            [str(directory / name) for name in sizes], targets, batch_size=FILES_AT_ONCE
        )
        self._names |= {str(step)}
        self._write(f"{step}.json", {"files": sizes})
        self._remove(f"{step}.{UNFINISHED}.json")

    def download(self, step: int, directory: Path) -> None:
        """Copies a committed step to `directory`, which is made; what it holds is not verified but for sizes.

        Raises:
          CheckpointDamaged: objects are missing, or of another size.
          OSError: there is no room for it, among other errors.
        """
        sizes = self._files(f"{step}.json")
        root = self._path(str(step))
        found = self._store.find(root, detail=True)  # by name without protocol
        for name, size in sizes.items():
            if found.get(f"{root.partition('://')[2]}/{name}", {}).get("size") != size:
                raise CheckpointDamaged(f"{root}/{name} is missing or has not {size} bytes")
        directory.mkdir(parents=True)
        targets = [str(directory / name) for name in sizes]
        self._store.get([f"{root}/{name}" for name in sizes], targets, batch_size=FILES_AT_ONCE)

    @contextlib.contextmanager
    def local_copy(self, step: int) -> Iterator[Path]:
        """A copy of a committed step in the directory for temporary files, deleted at the end.

        Raises:
          CheckpointDamaged: as `download`.
          CheckpointUnreadable: the store, or the directory, does not let it be copied.
        """
        with TemporaryDirectory(prefix="maxpipe-") as scratch:
            copy = Path(scratch, str(step))
            try:
                self.download(step, copy)
            except CheckpointDamaged:
                raise
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                raise CheckpointUnreadable(
                    f"{self.url}/{step} cannot be copied to {scratch}: {why}"
                ) from error
            yield copy

    def set_aside(self, step: int, state: str) -> str:
        """Makes a committed step one that is not restored, counted or deleted, until a step of its number is uploaded.

        Returns the URL of its commit, which undoes this when it gets its old name back.
        """
        name = f"{step}.{state}.json"
        self._store.cp_file(self._path(f"{step}.json"), self._path(name))
        self._names |= {name}
        self._remove(f"{step}.json")
        return self._path(name)

    def delete(self, step: int) -> None:
        """Deletes a step that is committed or unfinished."""
        if f"{step}.json" in self._names:
            self._write(f"{step}.{UNFINISHED}.json", {})
            self._remove(f"{step}.json")
        with contextlib.suppress(FileNotFoundError):
            self._store.rm(self._path(str(step)), recursive=True)
        self._names -= {str(step)}
        self._remove(f"{step}.{UNFINISHED}.json")

    def write_config(self, text: str) -> None:
        """Writes the configuration of the run as `config.yml` beside the directory of its steps."""
        self._store.pipe_file(f"{self.url.rpartition('/')[0]}/config.yml", text.encode())

    def _list(self) -> frozenset[str]:
        try:
            return frozenset(
                path.rstrip("/").rpartition("/")[2]
                for path in self._store.ls(self.url, detail=False)
            )
        except FileNotFoundError:
            return frozenset()

    def _files(self, commit: str) -> dict[str, int]:
        """Names and sizes of the objects of a step."""
        try:
            sizes = json.loads(self._store.cat_file(self._path(commit)))["files"]
            is_inside = not any(
                ".." in (path := PurePosixPath(name)).parts or path.is_absolute() for name in sizes
            )
            if is_inside and all(isinstance(size, int) for size in sizes.values()):
                return sizes
        except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointDamaged(f"{commit} cannot be read: {error}") from error
        raise CheckpointDamaged(f"{commit} is not a list of files and sizes")

    def _write(self, name: str, content: dict[str, Any]) -> None:
        self._store.pipe_file(self._path(name), json.dumps(content).encode())
        self._names |= {name}

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # Google's store says so, Amazon's does not
            self._store.rm_file(self._path(name))
        self._names -= {name}

    def _path(self, *names: str) -> str:
        return "/".join((self.url, *names))


def open_mirror(config: Config) -> Mirror | None:
    """The mirror that `checkpoint.mirror` asks for, listed, so that a store that does not answer shows here.

    Raises:
      ConfigError: the store cannot be read; names the key and what credentials come from.
    """
    if not config.checkpoint.mirror:
        return None
    return open_url(f"{config.checkpoint.mirror.rstrip('/')}/{config.run_name}/checkpoints", KEY)


def open_url(url: str, key: str) -> Mirror:
    """The mirror at a URL that `key` gave; raises as `open_mirror`."""
    with explained(url, key):
        return Mirror(url, open_store(url, key))


def _files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())
