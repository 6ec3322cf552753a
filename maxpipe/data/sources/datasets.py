"""Read data sets with Hugging Face's library `datasets`: a column of text, token ids or
conversations.

An entry of `data.path` is a directory that `save_to_disk` wrote, files of tables, or a data set of
the hub, `hf:NAME@REVISION:CONFIGURATION:SPLIT`, where everything but the name may be left out. The
library converts other formats to Arrow files once, and maps these into memory.
"""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from os.path import expanduser, isfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from maxpipe.config.catalog import PACKED, SOURCES
from maxpipe.config.imports import is_installed, optional
from maxpipe.config.model_places import SCHEME
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import Concatenation
from maxpipe.data.files import (
    find_files,
    local_files,
    path_error,
    require_content,
    sorted_parts,
    stored_files,
)
from maxpipe.data.sources.chat import Conversations, template_of
from maxpipe.data.sources.parquet import (
    COLUMNS,
    SUFFIXES,
    RowDocuments,
    Rows,
    document_field,
    lacks_column,
    streamed,
)
from maxpipe.storage.local_files import RemoteFile, cache_directory, local_file

if TYPE_CHECKING:
    from datasets import Dataset

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
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"  # files that `save_to_disk` writes


class HubName(NamedTuple):
    """A data set of the hub, or a directory laid out like one; None where nothing is given."""

    name: str
    revision: str | None
    configuration: str | None
    split: str


def hub_name(part: str) -> HubName:
    """Return the data set that an entry of `data.path` names."""
    name, configuration, split = [*part.removeprefix(SCHEME).split(":", 2), "", ""][:3]
    name, _, revision = name.partition("@")
    return HubName(expanduser(name), revision or None, configuration or None, split or "train")


def open_tables(config: DataConfig) -> list[tuple[str, "Dataset"]]:
    """Return the data sets of `data.path` by their names, sorted, the hub's last.

    Without a `data.cache_dir` the library chooses where Arrow files go. Raises ConfigError if a
    data set is missing or cannot be read, or the library is not installed.
    """
    parts = sorted_parts(config.path)
    if not parts:
        raise path_error(
            "this data.source needs a file, a directory or a glob here, or hf:NAME, a data set of "
            "the hub"
        )
    library = _library()
    # A saved data set may have a format, such as torch; without one, values are Python objects.
    return [(part, _open(part, config, library).with_format(None)) for part in parts]


def contents_of(part: str, config: DataConfig) -> tuple[list[str], str, str] | None:
    """Return what the rows of an entry of `data.path` come from, downloading it if need be.

    These are local files, the name of what else they depend on, "" if there is nothing else, and
    its digest, which begins with a commit of the hub; None for plain files. Raises ConfigError if
    it cannot be read.
    """
    if not part.startswith(SCHEME):
        directory = Path(part).expanduser()
        try:
            entries = json.loads((directory / _SAVED).read_bytes())["_data_files"]
            files = [directory / entry["filename"] for entry in entries]
        except Exception:  # not what `save_to_disk` writes; who reads the rows says so
            return None
        return [str(file) for file in files if file.is_file()], "", ""
    name = hub_name(part)
    selection = f"configuration {name.configuration or 'default'}, split {name.split}"
    if Path(name.name).is_dir():
        return local_files(name.name, ("",)), selection, selection
    if config.stream:
        commits = sorted({file.etag for file in _stored(part, config.cache_dir)})
    else:
        commits = _commits(_from_hub(part, config.cache_dir))
    shown = f"{SCHEME}{name.name}:{name.configuration or ''}:{name.split}"
    return [], shown, f"{' '.join(commits)} {selection}"


def _commits(rows: "Dataset") -> list[str]:
    """Return the hub commits that rows come from: their files' directories are named after them."""
    return sorted({Path(file["filename"]).parent.name for file in rows.cache_files})


def _open(part: str, config: DataConfig, library: ModuleType) -> "Dataset":
    if part.startswith(SCHEME):
        return _from_hub(part, config.cache_dir)
    directory = Path(part).expanduser()
    if isfile(directory / _SAVED):
        with _reading(part):
            return library.load_from_disk(str(directory))
    if isfile(directory / _SAVED_SPLITS):
        raise path_error(f"{part} is a data set of splits; give one, such as {directory}/train")
    return _from_files(part, config, library)


def _from_files(part: str, config: DataConfig, library: ModuleType) -> "Dataset":
    """Return the table of an entry's files, which must all be of one kind."""
    files = require_content(find_files(part, _SUFFIXES, config.cache_dir, config.cache_limit))
    builders: dict[str, list[str]] = {}
    for file in files:
        builders.setdefault(_builder(file), []).append(file)
    if len(builders) > 1:
        kinds = ", ".join(f"{kind} such as {names[0]}" for kind, names in builders.items())
        raise path_error(f"{part} has files of several kinds: {kinds}; give a glob for each")
    ((builder, names),) = builders.items()
    with _reading(part):
        cache_dir = _library_cache(config.cache_dir)
        return library.load_dataset(builder, data_files=names, split="train", cache_dir=cache_dir)


def _builder(file: str) -> str:
    name = file.lower()
    ending = Path(name.removesuffix(Path(name).suffix) if name.endswith(PACKED) else name).suffix
    if ending not in _BUILDERS:
        raise path_error(f"{file} is none of {', '.join(f'*{kind}' for kind in _BUILDERS)}")
    return _BUILDERS[ending]


def _from_hub(part: str, cache_dir: str) -> "Dataset":
    name = hub_name(part)
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
    if name.revision and not Path(name.name).is_dir():
        _check_revision(part, name.name, name.revision, _commits(rows))
    return rows


@cache  # a start asks several times, and must get one commit
def _stored(part: str, cache_dir: str) -> list[RemoteFile]:
    """Return the parquet files of an entry of `data.path` where they lie."""
    if not part.startswith(SCHEME):
        return stored_files(part, SUFFIXES)
    (name, revision, configuration, split), place = hub_name(part), _library_cache(cache_dir)
    with _reading(part):
        load_builder = _library().load_dataset_builder
        builder = load_builder(name, configuration, revision=revision, cache_dir=place)
    files = builder.config.data_files or {}
    urls = [str(url) for url in files.get(split, [])]
    others = [url for url in urls if not url.lower().endswith(SUFFIXES)]
    if others or not urls:
        there = ", ".join(map(str, files))
        reason = f"has {others[0]}" if others else f"has the splits {there or 'of a script'}"
        raise path_error(f"{part} {reason}; data.stream reads *.parquet of a whole split")
    if Path(name).is_dir():
        return [local_file(url) for url in urls]
    with _reading(part):
        from huggingface_hub import HfFileSystem

        sizes = [HfFileSystem().info(url)["size"] for url in urls]
    return [RemoteFile(u, n, u.partition("@")[2][:40]) for u, n in zip(urls, sizes, strict=True)]


def _check_revision(part: str, name: str, revision: str, commits: list[str]) -> None:
    """Refuse rows of another commit: offline, the library takes the newest one in its cache."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    wanted: str | None = revision
    if not _COMMIT.fullmatch(revision):  # a branch or tag: its commit at the last download
        # Loading a data set stores this file in a directory named after the commit.
        file = try_to_load_from_cache(name, "README.md", repo_type="dataset", revision=revision)
        if isinstance(file, str):
            wanted = Path(file).parent.name
        else:
            wanted = None
            with suppress(Exception):  # its type differs between versions
                wanted = HfApi().dataset_info(name, revision=revision, timeout=_HUB_SECONDS).sha
    if commits != [wanted]:
        other = ", ".join(commits)
        reason = f"the cache of this machine has commit {other}, not {wanted or 'that of it'}"
        raise path_error(
            f"{part}: {reason}; load it once where there is a network, or name a commit"
        )


@contextmanager
def _reading(part: str) -> Iterator[None]:
    """Turn errors of the library into a ConfigError that says what to do."""
    try:
        yield
    except Exception as error:  # of many libraries
        message = f"{part} cannot be read by datasets: {type(error).__name__}: {error}"
        if part.startswith(SCHEME):
            message += (
                "; the first start needs a network, and a token in HF_TOKEN if it is private; "
                "otherwise give the directory of save_to_disk, or files"
            )
        raise path_error(message) from error


def _library_cache(cache_dir: str) -> str | None:
    """Return where the library keeps Arrow files; None leaves it to HF_HOME."""
    return str(cache_directory(cache_dir) / "datasets") if cache_dir else None


def _library() -> ModuleType:
    with optional("datasets", "datasets", "data.source"):
        if not is_installed("datasets"):  # a folder `datasets` would be imported, too
            raise ModuleNotFoundError(name="datasets")
        import datasets
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def datasets(config: DataConfig) -> Concatenation:
    """Return the rows of the data sets of `data.path`, entries in sorted order, the hub's last;
    raises ConfigError if one cannot be read, or has no column of text or token ids.
    """
    names = [config.column] if config.column else COLUMNS
    if config.stream:
        files = [_stored(part, config.cache_dir) for part in sorted_parts(config.path)]
        return streamed([*chain(*files)], config.cache_dir, names)
    parts = []
    for name, rows in open_tables(config):
        # The schema gives a data set's column before any row is read.
        field = document_field(name, rows.features.arrow_schema, names)
        parts.append(RowDocuments(name, rows.select_columns([field.name])))
    return Concatenation(parts)


def datasets_chat(config: DataConfig) -> Concatenation:
    """Return the conversations in the data sets of `data.path`, in the order of `datasets`; errors
    are those of `datasets` and `template_of`.
    """
    template = template_of(config)
    column = config.column or "messages"
    parts = []
    for name, rows in open_tables(config):
        there = rows.column_names
        if column not in there:
            raise lacks_column(name, there, [column])
        chosen = rows.select_columns([each for each in there if each in (column, "tools")])
        records = Rows(name, chosen.rename_columns({column: "messages"}))
        parts.append(Conversations(records, template))
    return Concatenation(parts)
