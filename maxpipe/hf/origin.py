"""Keep the small files of the folder that a run was imported from, but no weights.

With these copies a run can be exported and generate text on machines without the folder.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from maxpipe.checkpoint.run_argument import open_steps
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.from_hf import FILE
from maxpipe.config.model_places import TOKENIZER, folder_of, maxtext_directory, open_folder, run_of
from maxpipe.config.sections import Config
from maxpipe.data.tokenizers import Tokenizer, main_file

ORIGIN = "origin"  # directory of a run
GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
EOS = "eos_token_id"


def read_origin(config: Config) -> dict[str, bytes]:
    """Return the files to keep, by name; none if the run is not imported.

    A run that starts from another run keeps that run's files. Raises ConfigError if an object store
    or the hub cannot be read.
    """
    if run := run_of(config.init_from):
        with open_steps(run, "init_from").local_files(ORIGIN) as files:
            return {file.name: file.read_bytes() for file in files if file.is_file()}
    weights = "" if maxtext_directory(config.init_from) else config.init_from
    key, value = ("init_from", weights) if weights else ("model.from_hf", config.model.from_hf)
    contents: dict[str, bytes] = {}
    if value:
        folder = open_folder(value, key)
        for name in (FILE, GENERATION, *TOKENIZER_FILES):
            with suppress(FileNotFoundError):
                contents[name] = folder.read(name)
    return contents


def origin_of(config: Config, kept: Sequence[Path]) -> Path | None:
    """Return the directory with the files that a run was imported with, None if there is none.

    Runs of earlier versions have no copies, `kept`; the result is then the folder itself, if it is
    a directory that still exists.
    """
    if kept:
        return kept[0].parent
    for value in (config.init_from, config.model.from_hf):
        folder = Path(folder_of(value))
        if value and (folder / FILE).is_file():
            return folder
    return None


def name_in_folder(tokenizer: Path) -> str:
    """Return the name that a tokenizer's main file has in a model's folder."""
    return "tokenizer.model" if tokenizer.suffix == ".model" else TOKENIZER


def read_kept(file: Path) -> bytes:
    """Return a small file that a run keeps; raises ConfigError if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        message = f"cannot read {file}: {error.strerror}"
        raise ConfigError(Problem("RUN_DIR", message)) from None


def is_imported(tokenizer: Path, origin: Path) -> bool:
    """Return whether a tokenizer's main file is a copy of the one that was imported."""
    original = origin / name_in_folder(tokenizer)
    return original.is_file() and read_kept(original) == read_kept(tokenizer)


def end_ids(origin: Path | None, companions: Sequence[Path]) -> set[int]:
    """Return the ids that end a text, according to generation_config.json, or else config.json, of
    `origin_of`; there are none if the run's tokenizer, `companions`, was not imported.
    """
    tokenizer = main_file(companions)
    if origin is None or tokenizer is None or not is_imported(tokenizer, origin):
        return set()
    for file in (origin / GENERATION, origin / FILE):
        if not file.is_file():
            continue
        try:
            content = json.loads(read_kept(file))
        except (ValueError, RecursionError) as error:
            raise ConfigError(Problem("RUN_DIR", f"{file} is not JSON: {error}")) from None
        value = content.get(EOS) if isinstance(content, Mapping) else None
        if value is not None:
            return {*value} if isinstance(value, list) else {value}
    return set()


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of special tokens under the names that config.json has for them."""
    ids = {
        "bos_token_id": tokenizer.bos_id,
        EOS: tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    return {name: index for name, index in ids.items() if index is not None}
