"""Open data sets with Hugging Face's library `datasets`.

A part of `data.path` is a directory that `save_to_disk` wrote, files of tables, or `hf:NAME`, a
data set of the hub, as `hf:NAME@REVISION:CONFIGURATION:SPLIT`, of which everything but the name may
be left out. The library makes Arrow files of what is not one yet, once, and maps them into memory.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import optional
from maxpipe.config.model_places import SCHEME
from maxpipe.data.files import find_files, parts_of, require_content
from maxpipe.storage.local_files import cache_directory

if TYPE_CHECKING:
    from datasets import Dataset

_PATH = "data.path"
_SUFFIXES = SOURCES["datasets"].suffixes
_BUILDERS = {  # of the library, by ending of the files
    ".arrow": "arrow",
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
}
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"  # what `save_to_disk` writes


class Table(NamedTuple):
    """A data set, and how messages call it."""

    name: str
    rows: "Dataset"


class HubName(NamedTuple):
    """A data set of the hub; what is not given is None."""

    name: str
    revision: str | None
    configuration: str | None
    split: str


def open_tables(path: str, cache_dir: str) -> list[Table]:
    """Return the data sets of `data.path`, parts in sorted order, those of the hub last.

    Args:
      path: `data.path`.
      cache_dir: `data.cache_dir`; empty leaves the place of Arrow files to the library.

    Raises:
      ConfigError: one is not there or cannot be read, or the library is not installed.
    """
    parts = sorted(set(parts_of(path)), key=lambda part: (part.startswith(SCHEME), part))
    if not parts:
        message = (
            "this data.source needs a file, a directory or a glob here, or hf:NAME, a data set of "
            "the hub"
        )
        raise ConfigError(Problem(_PATH, message))
    library = _library()
    tables = [_open(part, cache_dir, library) for part in parts]
    return [table for tables_of_part in tables for table in tables_of_part]


def version_on_hub(part: str, cache_dir: str) -> str:
    """Return a name of the contents of `hf:NAME`, after downloading it if it is not there.

    Args:
      part: of `data.path`.
      cache_dir: `data.cache_dir`.

    Raises:
      ConfigError: it cannot be read.
    """
    name = _hub_name(part)
    rows = _from_hub(part, cache_dir)
    # The library keeps the Arrow files in a directory with the name of the commit.
    commits = sorted({Path(file["filename"]).parent.name for file in rows.cache_files})
    facts = name.name, name.configuration, name.split, commits, len(rows)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _open(part: str, cache_dir: str, library: ModuleType) -> list[Table]:
    if part.startswith(SCHEME):
        return [Table(part, _from_hub(part, cache_dir))]
    directory = Path(part).expanduser()
    if (directory / _SAVED).is_file():
        with _reading(part):
            return [Table(part, library.load_from_disk(str(directory)))]
    if (directory / _SAVED_SPLITS).is_file():
        splits = json.loads((directory / _SAVED_SPLITS).read_text())["splits"]
        choices = ", ".join(str(directory / split) for split in splits)
        message = f"{part} has several splits; give one of {choices}"
        raise ConfigError(Problem(_PATH, message))
    return _from_files(part, cache_dir, library)


def _from_files(part: str, cache_dir: str, library: ModuleType) -> list[Table]:
    """Return a table for each kind of files."""
    files = require_content(find_files(part, _SUFFIXES, cache_dir))
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
    ending = Path(file.removesuffix(".gz").removesuffix(".zst")).suffix
    if ending not in _BUILDERS:
        message = f"{file} is none of {', '.join(f'*{kind}' for kind in _BUILDERS)}"
        raise ConfigError(Problem(_PATH, message))
    return _BUILDERS[ending]


def _hub_name(part: str) -> HubName:
    name, _, rest = part.removeprefix(SCHEME).partition(":")
    configuration, _, split = rest.partition(":")
    name, _, revision = name.partition("@")
    return HubName(name, revision or None, configuration or None, split or "train")


def _from_hub(part: str, cache_dir: str) -> "Dataset":
    name = _hub_name(part)
    library = _library()
    with _reading(part):
        return library.load_dataset(
            name.name,
            name.configuration,
            split=name.split,
            revision=name.revision,
            cache_dir=_library_cache(cache_dir),
        )


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
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = f"{type(error).__name__}: {error.__cause__ or error}"
        raise ConfigError(Problem(_PATH, f"{part} cannot be read by datasets: {reason}")) from error


def _library_cache(cache_dir: str) -> str | None:
    """Return where the library keeps Arrow files; None leaves it to HF_HOME."""
    return str(cache_directory(cache_dir) / "datasets") if cache_dir else None


def _library() -> ModuleType:
    """Import the library; raise ConfigError if it is not installed."""
    with optional("datasets", "datasets", "data.source"):
        import datasets
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets
