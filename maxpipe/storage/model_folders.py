"""Read a model's files in a directory, an object store, or on Hugging Face's hub.

The classes implement `maxpipe.config.model_places.ModelFolder`. Files of weights are read by byte
ranges, so no file is in memory as a whole. Small files of object stores are copied to
`data.cache_dir`, those of the hub to its library's cache, which is used without a network, too.
`HF_HUB_OFFLINE`, `HF_HOME`, `HF_TOKEN` and `HF_ENDPOINT` are the library's own variables.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import optional
from maxpipe.storage.local_files import cache_directory, sampled_digest, scratch_directory
from maxpipe.storage.object_store import explained, open_store

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

REQUEST = 4 << 20  # bytes
REQUESTS_AT_ONCE = 8
CONFIG = "config.json"  # which every model has
_MODEL = (CONFIG, ".safetensors")  # ends of the names of the files that are the model

# By the names of the library's errors; a gated model is also one that is not found.
_HUB_ERRORS = {
    "LocalEntryNotFoundError": (
        "is not in the cache of this machine, and the hub cannot be reached: download it where "
        "there is a network, with `hf download {id}`, or unset HF_HUB_OFFLINE"
    ),
    "GatedRepoError": (
        "is gated: accept its terms on its page of the hub, and give a token that may read it in "
        "HF_TOKEN, or by `hf auth login`"
    ),
    "RepositoryNotFoundError": (
        "is neither a directory here nor a public model of the hub: correct {id}, or, if it is "
        "private, give a token that may read it in HF_TOKEN"
    ),
    "RevisionNotFoundError": "names a revision that {id} does not have",
}


class LocalFile:
    block_size = 0

    def __init__(self, path: Path):
        self._path = path
        self.size = path.stat().st_size

    def __str__(self) -> str:
        return str(self._path)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the bytes of a range, uint8 [stop - start], mapped from the file."""
        if start == stop:
            return np.empty(0, np.uint8)
        return np.memmap(self._path, np.uint8, "r", start, (stop - start,))


class LocalFolder:
    """The `ModelFolder` of a directory of this machine."""

    def __init__(self, directory: str | Path, key: str = ""):
        self._directory = Path(directory)

    def __str__(self) -> str:
        return str(self._directory)

    def names(self) -> list[str]:
        return sorted(file.name for file in self._directory.iterdir() if file.is_file())

    def open(self, names: Sequence[str]) -> list[LocalFile]:
        if absent := [name for name in names if not (self._directory / name).is_file()]:
            raise FileNotFoundError(", ".join(absent))
        return [LocalFile(self._directory / name) for name in names]

    def read(self, name: str) -> bytes:
        file = self._directory / name
        if not file.is_file():  # a pipe would never end
            raise FileNotFoundError(name)
        return file.read_bytes()

    def digest(self) -> str:
        files = [self._directory / name for name in self.names() if name.endswith(_MODEL)]
        return directory_digest(self._directory, files)

    def fetch(self, names: Sequence[str], cache_dir: str) -> Path:
        return self._directory


class StoreFile:
    """An object that is read by ranges, several requests at a time."""

    block_size = REQUEST * REQUESTS_AT_ONCE

    def __init__(self, url: str, size: int, store: "AbstractFileSystem", key: str):
        self.size = size
        self._url, self._store, self._key = url, store, key

    def __str__(self) -> str:
        return self._url

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the bytes of a range, uint8 [stop - start]."""
        starts = [*range(start, stop, REQUEST)]
        ends = [min(first + REQUEST, stop) for first in starts]
        with explained(self._url, self._key):
            pieces = self._store.cat_ranges(
                [self._url] * len(starts),
                starts,
                ends,
                on_error="raise",
                batch_size=REQUESTS_AT_ONCE,
            )
        return np.frombuffer(b"".join(pieces), np.uint8)


class StoreFolder:
    """The `ModelFolder` of a prefix of an object store, which is listed once."""

    def __init__(self, url: str, key: str):
        self._url = url.rstrip("/")
        self._key = key
        self._store = open_store(self._url, key)

    def __str__(self) -> str:
        return self._url

    def names(self) -> list[str]:
        return sorted(self._files)

    def open(self, names: Sequence[str]) -> list[StoreFile]:
        if absent := [name for name in names if name not in self._files]:
            raise FileNotFoundError(", ".join(absent))
        return [
            StoreFile(f"{self._url}/{name}", self._files[name]["size"], self._store, self._key)
            for name in names
        ]

    def read(self, name: str) -> bytes:
        (file,) = self.open([name])
        return file.read(0, file.size).tobytes()

    def digest(self) -> str:
        return _digest_of([self._facts(name) for name in self.names() if name.endswith(_MODEL)])

    def _facts(self, name: str) -> tuple[object, ...]:
        return (name, *map(self._files[name].get, ("size", "ETag", "etag")))

    def fetch(self, names: Sequence[str], cache_dir: str) -> Path:
        present = [name for name in names if name in self._files]
        facts = [self._facts(name) for name in present]
        digest = _digest_of((self._url, facts))
        directory = cache_directory(cache_dir) / f"model-{digest}"
        if directory.is_dir():
            return directory
        contents = {name: self.read(name) for name in present}
        try:
            with scratch_directory(directory.parent) as scratch:
                (complete := scratch / "complete").mkdir()
                for name, content in contents.items():
                    (complete / name).write_bytes(content)
                complete.rename(directory)
        except OSError as error:
            if not directory.is_dir():  # which another process has written meanwhile
                message = f"cannot keep a copy of {self._url} in {directory.parent}: {error}"
                raise ConfigError(Problem("data.cache_dir", message)) from error
        return directory

    @cached_property
    def _files(self) -> Mapping[str, Mapping[str, Any]]:
        with explained(self._url, self._key):
            listed = self._store.ls(self._url, detail=True)
        return {
            entry["name"].rpartition("/")[2]: entry for entry in listed if entry["type"] == "file"
        }


class HubFolder:
    """The `ModelFolder` of a model on the hub, whose files are downloaded on request.

    `model` is `org/name`, or `org/name@REVISION` for a branch, tag or commit; `key` named it.
    """

    def __init__(self, model: str, key: str):
        with optional("huggingface_hub", "hub", key):
            import huggingface_hub
            import huggingface_hub.errors
        self._library, self._model, self._key = huggingface_hub, model, key
        self._id, _, revision = model.partition("@")
        self._revision = revision or None

    def __str__(self) -> str:
        return self._model

    def names(self) -> list[str]:
        # Folders are left out, since they may hold checkpoints of the model's training.
        try:
            names = self._library.list_repo_files(self._id, revision=self._revision)
        except Exception:  # without a network; its type differs between versions
            return self._local([CONFIG]).names()
        return sorted(name for name in names if "/" not in name)

    def open(self, names: Sequence[str]) -> list[LocalFile]:
        return self._local(names).open(names)

    def read(self, name: str) -> bytes:
        return self._local([name]).read(name)

    def digest(self) -> str:
        return self.fetch([CONFIG], "").name  # the model's commit

    def _local(self, names: Sequence[str]) -> LocalFolder:
        return LocalFolder(self.fetch(names, ""))

    def fetch(self, names: Sequence[str], cache_dir: str) -> Path:
        try:
            return Path(
                self._library.snapshot_download(
                    self._id,
                    revision=self._revision,
                    allow_patterns=list(names),
                    library_name="maxpipe",
                )
            )
        except Exception as error:  # httpx and Xet have types of their own
            kinds = [kind.__name__ for kind in type(error).__mro__]
            unknown = f"cannot be read from the hub: {kinds[0]}: {error}"
            reason = next((text for kind, text in _HUB_ERRORS.items() if kind in kinds), unknown)
            message = f"{self._model} {reason.replace('{id}', self._id)}"
            raise ConfigError(Problem(self._key, message)) from None


def directory_digest(directory: Path, files: Sequence[Path]) -> str:
    """Return a digest of files of a directory: names, sizes, and 64 KiB of each."""
    sized = [(str(file.relative_to(directory)), file, file.stat().st_size) for file in files]
    return _digest_of([(name, size, sampled_digest(str(f), size)) for name, f, size in sized])


def _digest_of(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
