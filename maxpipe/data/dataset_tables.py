"""Open data sets with Hugging Face's library `datasets`.

An entry of `data.path` is a directory that `save_to_disk` wrote, files of tables, or a data set of
the hub, `hf:NAME@REVISION:CONFIGURATION:SPLIT`, where everything but the name may be left out. The
library converts other formats to Arrow files once, and maps these into memory.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import isfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from maxpipe.config.catalog import PACKED, SOURCES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import is_installed, optional
from maxpipe.config.model_places import SCHEME
from maxpipe.data.files import find_files, local_files, require_content, sorted_parts
from maxpipe.storage.local_files import cache_directory, list_remote
from maxpipe.storage.object_store import is_remote

if TYPE_CHECKING:
    from datasets import Dataset

_PATH = "data.path"
_SUFFIXES = SOURCES["datasets"].suffixes
_BUILDERS = {  # the library's builders, by file ending
    ".arrow": "arrow",
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_SECONDS = 10.0  # timeout of a request to the hub
# The last three come from JSON that is not what `save_to_disk` writes.
_UNREADABLE = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError)
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"  # files that `save_to_disk` writes


class Table(NamedTuple):
    """A data set and its name in messages."""

    name: str
    rows: "Dataset"


class Contents(NamedTuple):
    """What the rows of an entry of `data.path` come from.

    Attributes:
      files: local files that hold the rows.
      name: what else the rows depend on, without a revision; "" if there is nothing else.
      digest: digest of that; for a data set of the hub it begins with the commit.
    """

    files: list[str]
    name: str
    digest: str


class HubName(NamedTuple):
    """A data set of the hub, or a directory laid out like one; None where nothing is given."""

    name: str
    revision: str | None
    configuration: str | None
    split: str

    @property
    def is_directory(self) -> bool:
        """Return whether it is a directory."""
        return Path(self.name).is_dir()

    def __str__(self) -> str:
        """Return it in the syntax of `data.path`."""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{SCHEME}{self.name}{revision}:{self.configuration or ''}:{self.split}"


def open_tables(path: str, cache_dir: str, limit: int = 0) -> list[Table]:
    """Return the data sets of `data.path`, entries in sorted order, the hub's last.

    Args:
      path: `data.path`.
      cache_dir: `data.cache_dir`; if empty, the library chooses where Arrow files go.
      limit: `data.cache_limit`, which applies to copies of remote files.

    Raises:
      ConfigError: a data set is missing or cannot be read, or the library is not installed.
    """
    parts = sorted_parts(path)
    if not parts:
        message = (
            "this data.source needs a file, a directory or a glob here, or hf:NAME, a data set of "
            "the hub"
        )
        raise ConfigError(Problem(_PATH, message))
    library = _library()
    tables = [_open(part, cache_dir, limit, library) for part in parts]
    return [table for tables_of_part in tables for table in tables_of_part]


def contents_of(part: str, cache_dir: str) -> Contents | None:
    """Return what an entry's rows come from, downloading it if need be; None for plain files.

    Args:
      part: an entry of `data.path`.
      cache_dir: `data.cache_dir`.

    Raises:
      ConfigError: the entry cannot be read.
    """
    if not part.startswith(SCHEME):
        return _contents_saved(Path(part).expanduser())
    name = _hub_name(part)
    selection = f"configuration {name.configuration or 'default'}, split {name.split}"
    if name.is_directory:
        return Contents(local_files(name.name, ("",)), selection, selection)
    commits = _commits(_from_hub(part, cache_dir))
    return Contents([], str(name._replace(revision=None)), f"{' '.join(commits)} {selection}")


def _contents_saved(directory: Path) -> Contents | None:
    """Return the files with the rows of a `save_to_disk` directory; None if it is not one."""
    try:
        entries = json.loads((directory / _SAVED).read_bytes())["_data_files"]
        files = [directory / entry["filename"] for entry in entries]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return Contents([str(file) for file in files if file.is_file()], "", "")


def _commits(rows: "Dataset") -> list[str]:
    """Return the hub commits that rows come from: their files' directories are named after them."""
    return sorted({Path(file["filename"]).parent.name for file in rows.cache_files})


def _open(part: str, cache_dir: str, limit: int, library: ModuleType) -> list[Table]:
    if part.startswith(SCHEME):
        return [Table(part, _from_hub(part, cache_dir))]
    directory = Path(part).expanduser()
    if isfile(directory / _SAVED):
        with _reading(part):
            return [Table(part, library.load_from_disk(str(directory)))]
    if isfile(directory / _SAVED_SPLITS):
        with _reading(part):
            splits = json.loads((directory / _SAVED_SPLITS).read_text())["splits"]
            choices = ", ".join(str(directory / split) for split in splits)
        message = f"{part} is a data set of splits; give one of {choices}"
        raise ConfigError(Problem(_PATH, message))
    return _from_files(part, cache_dir, limit, library)


def _from_files(part: str, cache_dir: str, limit: int, library: ModuleType) -> list[Table]:
    """Return the table of an entry's files, which must all be of one kind."""
    if is_remote(part):
        stored = {Path(file.name).name for file in list_remote(part, _SUFFIXES)}
        if stored & {_SAVED, _SAVED_SPLITS}:
            message = (
                f"{part} is a directory of save_to_disk, which must be on this machine: copy it"
            )
            raise ConfigError(Problem(_PATH, message))
    files = require_content(find_files(part, _SUFFIXES, cache_dir, limit))
    builders: dict[str, list[str]] = {}
    for file in files:
        builders.setdefault(_builder(file), []).append(file)
    if len(builders) > 1:
        kinds = ", ".join(f"{kind} such as {names[0]}" for kind, names in builders.items())
        message = f"{part} has files of several kinds: {kinds}; give a glob for each"
        raise ConfigError(Problem(_PATH, message))
    ((builder, names),) = builders.items()
    with _reading(part):
        rows = library.load_dataset(
            builder, data_files=names, split="train", cache_dir=_library_cache(cache_dir)
        )
    return [Table(part, rows)]


def _builder(file: str) -> str:
    name = file.lower()
    ending = Path(name.removesuffix(Path(name).suffix) if name.endswith(PACKED) else name).suffix
    if ending not in _BUILDERS:
        message = f"{file} is none of {', '.join(f'*{kind}' for kind in _BUILDERS)}"
        raise ConfigError(Problem(_PATH, message))
    return _BUILDERS[ending]


def _hub_name(part: str) -> HubName:
    name, _, rest = part.removeprefix(SCHEME).partition(":")
    configuration, _, split = rest.partition(":")
    name, _, revision = name.partition("@")
    if name.startswith("~"):
        name = os.path.expanduser(name)
    return HubName(name, revision or None, configuration or None, split or "train")


def _from_hub(part: str, cache_dir: str) -> "Dataset":
    name = _hub_name(part)
    library = _library()
    with _reading(part):
        rows = library.load_dataset(
            name.name,
            name.configuration,
            split=name.split,
            revision=name.revision,
            cache_dir=_library_cache(cache_dir),
            keep_in_memory=False,
        )
    if name.revision and not name.is_directory:
        _check_revision(part, name.name, name.revision, _commits(rows))
    return rows


def _check_revision(part: str, name: str, revision: str, commits: list[str]) -> None:
    """Refuse rows of another commit: offline, the library takes the newest one in its cache."""
    wanted = revision if _COMMIT.fullmatch(revision) else _commit_of(name, revision)
    if commits != [wanted]:
        reason = (
            f"the cache of this machine has commit {', '.join(commits)}, not {wanted}"
            if wanted
            else f"which commit {revision} is can only be said by the hub, which does not answer"
        )
        message = f"{part}: {reason}; load it once where there is a network, or name a commit"
        raise ConfigError(Problem(_PATH, message))


def _commit_of(name: str, revision: str) -> str:
    """Return the commit of a branch or tag, as it was at the last download; "" if not known."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    # Loading a data set stores this file in a directory named after the commit.
    file = try_to_load_from_cache(name, "README.md", repo_type="dataset", revision=revision)
    if isinstance(file, str):
        return Path(file).parent.name
    try:
        return HfApi().dataset_info(name, revision=revision, timeout=_HUB_SECONDS).sha or ""
    except Exception:  # its type differs between versions
        return ""


@contextmanager
def _reading(part: str) -> Iterator[None]:
    """Turn errors of the library into a ConfigError that says what to do."""
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    try:
        yield
    except DatasetNotFoundError as error:
        remedy = "correct its name; a private or gated one needs a token in HF_TOKEN"
        raise ConfigError(Problem(_PATH, f"{part}: {error}; {remedy}")) from error
    except ConnectionError as error:
        message = (
            f"{part} is not in the cache of this machine, and the hub cannot be reached: load it "
            "once where there is a network, or give the directory of save_to_disk or files"
        )
        raise ConfigError(Problem(_PATH, message)) from error
    except (*_UNREADABLE, DatasetsError) as error:
        reason = f"{type(error).__name__}: {error.__cause__ or error}"
        raise ConfigError(Problem(_PATH, f"{part} cannot be read by datasets: {reason}")) from error
    except Exception as error:
        # The hub's HTTP client is httpx or httpx2, by version.
        if not type(error).__module__.startswith("httpx"):
            raise
        reason = f"{type(error).__name__}: {error}"
        message = f"{part} could not be downloaded: {reason}; another start goes on with the rest"
        raise ConfigError(Problem(_PATH, message)) from error


def _library_cache(cache_dir: str) -> str | None:
    """Return where the library keeps Arrow files; None leaves it to HF_HOME."""
    return str(cache_directory(cache_dir) / "datasets") if cache_dir else None


def _library() -> ModuleType:
    """Import the library; raise ConfigError if it is not installed."""
    with optional("datasets", "datasets", "data.source"):
        if not is_installed("datasets"):  # a folder `datasets` would be imported, too
            raise ModuleNotFoundError(name="datasets")
        import datasets
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets
