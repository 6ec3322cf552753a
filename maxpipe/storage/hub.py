"""Read a model's files on Hugging Face's hub, through the library's cache on this machine.

`HF_HUB_OFFLINE`, `HF_HOME`, `HF_TOKEN` and `HF_ENDPOINT` are the library's own variables. Without a
network, the files in its cache are used.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import optional
from maxpipe.storage.model_folders import LocalFile

DOWNLOADS_AT_ONCE = 8
_CONFIG = "config.json"  # which every model has


class HubFolder:
    """The `ModelFolder` of a model on the hub, whose files are downloaded on request.

    `model` is `org/name`, or `org/name@REVISION` for a branch, tag or commit; `key` named it.

    Raises:
      ConfigError: the library is not installed.
    """

    def __init__(self, model: str, key: str):
        with optional("huggingface_hub", "hub", key):
            import huggingface_hub
            import huggingface_hub.errors
        self._library = huggingface_hub
        self._model = model
        self._key = key
        self._id, _, revision = model.partition("@")
        self._revision = revision or None

    def __str__(self) -> str:
        return self._model

    def names(self) -> list[str]:
        # Folders are left out, since they may hold checkpoints of the model's training.
        try:
            names = self._library.list_repo_files(self._id, revision=self._revision)
            return sorted(name for name in names if "/" not in name)
        except Exception:  # without a network; its type differs between versions
            with self._explained():
                snapshot = self._path(_CONFIG).parent
            return sorted(file.name for file in snapshot.iterdir() if file.is_file())

    def open(self, names: Sequence[str]) -> list[LocalFile]:
        absent = []
        paths = []
        with self._explained(), ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:
            downloads = {name: pool.submit(self._path, name) for name in names}
            for name, download in downloads.items():
                try:
                    paths.append(download.result())
                except FileNotFoundError:
                    absent.append(name)
        if absent:
            raise FileNotFoundError(", ".join(absent))
        return [LocalFile(path) for path in paths]

    def read(self, name: str) -> bytes:
        with self._explained():
            return self._path(name).read_bytes()

    def digest(self) -> str:
        with self._explained():
            return self._path(_CONFIG).parent.name  # the model's commit

    def fetch(self, names: Sequence[str], cache_dir: str) -> Path:
        with self._explained():
            directory = self._path(_CONFIG).parent
            for name in names:
                with suppress(FileNotFoundError):
                    self._path(name)
        return directory

    def _path(self, name: str) -> Path:
        """Return a file in the cache, downloaded if need be; FileNotFoundError if there is none."""
        errors = self._library.errors
        try:
            download = self._library.hf_hub_download
            return Path(download(self._id, name, revision=self._revision, library_name="maxpipe"))
        except errors.LocalEntryNotFoundError:
            known = self._library.try_to_load_from_cache(self._id, _CONFIG, revision=self._revision)
            # The cache has the model, but not this file.
            if name != _CONFIG and isinstance(known, str):
                raise FileNotFoundError(name) from None
            raise _Unreachable from None
        except errors.RemoteEntryNotFoundError:
            raise FileNotFoundError(name) from None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the library into a ConfigError that says what to do."""
        errors = self._library.errors
        try:
            yield
        except FileNotFoundError:
            raise
        except _Unreachable:
            reason = (
                "is not in the cache of this machine, and the hub cannot be reached: download it "
                f"where there is a network, with `hf download {self._id}`, or unset HF_HUB_OFFLINE"
            )
        except errors.GatedRepoError:
            reason = (
                "is gated: accept its terms on its page of the hub, and give a token that may read "
                "it in HF_TOKEN, or by `hf auth login`"
            )
        except errors.RepositoryNotFoundError:
            reason = (
                f"is neither a directory here nor a public model of the hub: correct {self._id}, "
                "or, if it is private, give a token that may read it in HF_TOKEN"
            )
        except errors.RevisionNotFoundError:
            reason = f"names a revision that {self._id} does not have"
        except Exception as error:  # httpx and Xet have types of their own
            reason = f"cannot be read from the hub: {type(error).__name__}: {error}"
        else:
            return
        raise ConfigError(Problem(self._key, f"{self._model} {reason}")) from None


class _Unreachable(Exception):
    """A file is not in the cache, and the hub does not answer."""
