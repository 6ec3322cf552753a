"""Keep a copy of each step in an object store, visible only when it is complete.

The objects of a step are below `<step>/`, named like its files on disk. An object store cannot
rename, so the commit is one small object next to them, `<step>.json`, with their names and sizes.
It is written after all of them and deleted before them. Setting a step aside renames the commit to
`<step>.damaged.json` or `<step>.abandoned.json`. While objects are being written or deleted, there
is a `<step>.unfinished.json`, so that the remains of a killed process are deleted. Imports no JAX.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointUnreadable
from maxpipe.checkpoint.record import FILE, ITEM, Record, parse_step_record
from maxpipe.checkpoint.steps import (
    ABANDONED,
    CHECKPOINTS,
    COMMITTED,
    DAMAGED,
    UNFINISHED,
    StepEntry,
    StepStore,
)
from maxpipe.config import Config
from maxpipe.config.sections import CheckpointConfig
from maxpipe.storage.lease import LeaseObjects
from maxpipe.storage.local_files import scratch_directory
from maxpipe.storage.object_store import Deadline, explained, open_store
from maxpipe.storage.records import Damaged, parse_record

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

KEY = "checkpoint.mirror"
FILES_AT_ONCE = 4  # each with up to ten parts of 50 MB in memory

_STATE = re.compile(rf"(0|[1-9]\d*)(?:\.({DAMAGED}|{ABANDONED}|{UNFINISHED}))?\.json")


class Mirror(StepStore):
    """The `StepStore` of one run in an object store; one process at a time may write to it.

    The store is listed once, when the object is made; later changes by other programs go
    unnoticed. Every method may raise the store's own errors, and `StoreSilent` once the store has
    been silent for `deadline_seconds`; 0 = never. `url` is that of the steps, such as
    `s3://bucket/runs/base/checkpoints`.
    """

    def __init__(
        self,
        url: str,
        store: "AbstractFileSystem",
        deadline_seconds: float = CheckpointConfig.mirror_deadline_seconds,
    ):
        self.url = url.rstrip("/")
        self._run = self.url.rpartition("/")[0]
        self._store = store
        self._seconds = deadline_seconds
        self._deadline = Deadline(deadline_seconds)
        self._ask = self._deadline.wait
        self._names = self._list()  # replaced, never mutated: other threads may be reading it

    def __str__(self) -> str:
        return self.url

    def lease_place(self) -> LeaseObjects:
        """Return where the lease of the run lies: next to the directory of its steps."""
        return LeaseObjects(self._run, self._store, Deadline(self._seconds))

    def entries(self) -> list[StepEntry]:
        # A step is unfinished only if nothing gives it another state: a process may be killed
        # between a commit and the deletion of the mark.
        matches = [match for name in self._names if (match := _STATE.fullmatch(name))]
        entries = [StepEntry(int(match[1]), match[0], match[2] or COMMITTED) for match in matches]
        finished = {entry.step for entry in entries if entry.state != UNFINISHED}
        return sorted(e for e in entries if e.state != UNFINISHED or e.step not in finished)

    def sizes_and_times(self) -> Iterator[tuple[StepEntry, int, datetime]]:
        for entry in self.entries():
            try:
                objects = self._find(self._path(str(entry.step)))
                time = self._ask(self._store.modified, self._path(entry.name))
            except FileNotFoundError:
                continue  # a running training has just committed or deleted it
            yield entry, sum(info["size"] for info in objects.values()), time.astimezone()

    def record(self, step: int) -> Record:
        place = self._path(str(step))
        try:
            data = self._ask(self._store.cat_file, f"{place}/{ITEM}/{FILE}")
        except FileNotFoundError as error:
            raise CheckpointDamaged(place, f"its record is missing: {error}") from error
        return parse_step_record(data, place)

    def upload(self, step: int, directory: Path) -> None:
        """Copy the committed checkpoint in `directory`; it becomes visible when it is complete.

        Copies of the same step that were set aside are overwritten.
        """
        files = [path for path in directory.rglob("*") if path.is_file()]
        sizes = {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}
        earlier = {entry.name for entry in self.entries() if entry.step == step}
        # 1. Mark the step as unfinished, and only then remove the state of an earlier copy.
        self._write(mark := f"{step}.{UNFINISHED}.json", {})
        for name in earlier - {mark}:
            self._remove(name)
        # 2. Copy the files.
        sources = [str(directory / name) for name in sizes]
        self._copy(self._store.put, sources, [self._path(str(step), name) for name in sizes])
        self._names |= {str(step)}
        # 3. Commit, then remove the mark.
        self._write(f"{step}.json", {"files": sizes})
        self._remove(mark)

    def download(self, step: int, directory: Path) -> None:
        """Copy a committed step to a new `directory`; only the sizes of its files are verified.

        Raises CheckpointDamaged for objects that are missing, or of another size, and
        CheckpointUnreadable if the store or the file system does not allow it.
        """
        root = self._path(str(step))
        try:
            commit = self._ask(self._store.cat_file, f"{root}.json")
            sizes = parse_record(commit, dict[str, dict[str, int]])["files"]
            objects = self._find(root)
            for name, size in sizes.items():
                if ".." in name or objects.get(name, {}).get("size") != size:
                    raise CheckpointDamaged(root, f"{name} is missing or has not {size} bytes")
            directory.mkdir(parents=True)
            sources = [f"{root}/{name}" for name in sizes]
            self._copy(self._store.get, sources, [str(directory / name) for name in sizes])
        except CheckpointDamaged:
            raise
        except (FileNotFoundError, Damaged, LookupError) as error:
            raise CheckpointDamaged(root, f"it cannot be fetched: {error}") from error
        # Every store has errors of its own; none of them means that the checkpoint is damaged.
        except Exception as error:
            reason = f"it cannot be fetched: {type(error).__name__}: {error}"
            raise CheckpointUnreadable(root, reason) from error

    @contextlib.contextmanager
    def local_copy(self, step: int) -> Iterator[Path]:
        with scratch_directory() as scratch:
            self.download(step, scratch / str(step))
            yield scratch / str(step)

    def set_aside(self, step: int, state: str) -> str:
        name = f"{step}.{state}.json"
        commit = self._path(f"{step}.json")
        self._ask(self._store.cp_file, commit, self._path(name))
        self._names |= {name}
        self._remove(f"{step}.json")
        return self._path(name)

    def delete(self, step: int) -> None:
        if f"{step}.json" in self._names:
            self._write(f"{step}.{UNFINISHED}.json", {})
            self._remove(f"{step}.json")
        with contextlib.suppress(FileNotFoundError):
            self._ask(self._store.rm, self._path(str(step)), recursive=True)
        self._names -= {str(step)}
        self._remove(f"{step}.{UNFINISHED}.json")

    @contextlib.contextmanager
    def local_files(self, name: str) -> Iterator[list[Path]]:
        with scratch_directory() as scratch:
            try:
                entries = self._ask(self._store.ls, f"{self._run}/{name}", detail=True)
            except FileNotFoundError:
                entries = []
            names = [entry["name"] for entry in entries if entry["type"] == "file"]
            if names:
                self._ask(self._store.get, names, f"{scratch}/")
            yield sorted(scratch.iterdir())

    def write_file(self, name: str, content: bytes) -> None:
        """Write a file of the run, such as `config.yml`, next to the directory of its steps."""
        self._ask(self._store.pipe_file, f"{self._run}/{name}", content)

    def _list(self) -> frozenset[str]:
        try:
            paths = self._ask(self._store.ls, self.url, detail=False)
        except FileNotFoundError:
            return frozenset()
        return frozenset(path.rstrip("/").rpartition("/")[2] for path in paths)

    def _write(self, name: str, content: Mapping[str, object]) -> None:
        data = json.dumps(content).encode()
        self._ask(self._store.pipe_file, self._path(name), data)
        self._names |= {name}

    def _remove(self, name: str) -> None:
        # Google's store raises an error for an object that is not there, Amazon's does not.
        with contextlib.suppress(FileNotFoundError):
            self._ask(self._store.rm_file, self._path(name))
        self._names -= {name}

    def _copy(
        self, transfer: Callable[..., object], sources: list[str], targets: list[str]
    ) -> None:
        callback = self._deadline.callback()
        self._ask(transfer, sources, targets, callback=callback, batch_size=FILES_AT_ONCE)

    def _find(self, root: str) -> dict[str, dict[str, int]]:
        prefix = f"{root.partition('://')[2]}/"
        objects: dict[str, dict[str, int]] = self._ask(self._store.find, root, detail=True)
        return {name.removeprefix(prefix): facts for name, facts in objects.items()}

    def _path(self, *names: str) -> str:
        return "/".join((self.url, *names))


def open_mirror(config: Config) -> Mirror | None:
    """Return the mirror at `checkpoint.mirror`, or None if it is empty; raises as `open_url`."""
    if not config.checkpoint.mirror:
        return None
    url = f"{config.checkpoint.mirror.rstrip('/')}/{config.run_name}/{CHECKPOINTS}"
    return open_url(url, KEY, config.checkpoint.mirror_deadline_seconds)


def open_url(
    url: str, key: str, deadline_seconds: float = CheckpointConfig.mirror_deadline_seconds
) -> Mirror:
    """Return the mirror at a URL that was given as `key`; raises as `open_store`, `explained`."""
    with explained(url, key):
        return Mirror(url, open_store(url, key), deadline_seconds)
