"""Find a Hugging Face model: in a directory, in an object store, or on the hub.

`hf:org/name` is a model of the hub unless there is a directory `org/name`; `hf:` and anything else
is a directory. Object stores have URLs. The catalogue has the reader of each place.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from maxpipe.config.catalog import MODEL_PLACES
from maxpipe.config.imports import implementation

if TYPE_CHECKING:
    import numpy as np

SCHEME = "hf:"  # before a folder, where a key takes other things as well
MAXTEXT = "maxtext:"  # before the directory of a checkpoint of MaxText, in `init_from`
RUN = "run:"  # before the directory of another run, in `init_from`
FOLDER_SCHEMES = (SCHEME, MAXTEXT, RUN)
TOKENIZER = "tokenizer.json"
PLAIN_IDS = "ids:"  # in data.tokenizer, before a number of ids that stand for no text
CHATML = "chatml"  # in data.chat_template: a template that needs no file
LEAST_PLAIN_IDS = 2  # one of them ends documents

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")  # org/name, org/name@revision
_URL = re.compile(r"[a-z][a-z0-9]*://.+")


class ModelFile(Protocol):
    """A file of `size` bytes that is read by byte ranges.

    One read should have at most `block_size` bytes; 0 if reads take no memory.
    """

    size: int
    block_size: int

    def read(self, start: int, stop: int) -> "np.ndarray":
        """Return the bytes of a range, uint8 [stop - start]."""


class ModelFolder(Protocol):
    """The files of a model; `str()` returns the place as users write it.

    Every method raises ConfigError if the place cannot be read.
    """

    def names(self) -> list[str]:
        """Return the names of all files."""

    def open(self, names: Sequence[str]) -> list[ModelFile]:
        """Return files for reading; raises FileNotFoundError with the names that do not exist."""

    def read(self, name: str) -> bytes:
        """Return a whole small file; raises FileNotFoundError if it does not exist."""

    def digest(self) -> str:
        """Return a text that tells models apart: a digest of files or of a listing, or a commit."""

    def fetch(self, names: Sequence[str], cache_dir: str) -> Path:
        """Return a directory of this machine with those of the named small files that exist.

        Other places are copied to `cache_dir`, the value of `data.cache_dir`.
        """


def split_scheme(value: str) -> tuple[str, str]:
    """Return the scheme of a value, "" if it has none, and the folder after it."""
    scheme = next((scheme for scheme in FOLDER_SCHEMES if value.startswith(scheme)), "")
    return scheme, value.removeprefix(scheme)


def folder_of(value: str) -> str:
    """Return the folder of `hf:FOLDER`; a value without the scheme is itself the folder."""
    return os.path.expanduser(value.removeprefix(SCHEME))


def maxtext_directory(value: str) -> str:
    """Return the directory of `maxtext:DIR`; "" if a value has another scheme or none."""
    scheme, directory = split_scheme(value)
    return os.path.expanduser(directory) if scheme == MAXTEXT else ""


def run_of(value: str) -> str:
    """Return the directory of `run:DIR`; "" if a value has another scheme or none."""
    scheme, directory = split_scheme(value)
    return os.path.expanduser(directory) if scheme == RUN else ""


def is_url(folder: str) -> bool:
    """Return whether a folder is in an object store."""
    return _URL.fullmatch(folder) is not None


def is_directory(folder: str) -> bool:
    """Return whether a folder is a directory of this machine, existing or not."""
    return not is_url(folder) and (os.path.isdir(folder) or not _HUB_NAME.fullmatch(folder))


def open_folder(value: str, key: str) -> ModelFolder:
    """Return the folder that the value of a key names, with or without the scheme; raises
    ConfigError if a library that reads the place is missing.
    """
    folder = folder_of(value)
    place = "store" if is_url(folder) else "directory" if is_directory(folder) else "hub"
    return implementation(MODEL_PLACES[place])(folder, key)


def num_plain_ids(value: str) -> int:
    """Return N of `data.tokenizer=ids:N`; 0 for another tokenizer, or if N is not legal."""
    match = re.fullmatch(PLAIN_IDS + "([0-9]{1,9})", value)
    return int(match[1]) if match and int(match[1]) >= LEAST_PLAIN_IDS else 0


def tokenizer_path(value: str) -> str:
    """Return the file that `data.tokenizer` names, for a folder its tokenizer.json."""
    path = folder_of(value)
    names_file = path.endswith((".json", ".model")) and not value.startswith(SCHEME)
    is_folder = value.startswith(SCHEME) or (is_url(path) and not names_file)
    return f"{path.rstrip('/')}/{TOKENIZER}" if is_folder else path


def tokenizer_folder(value: str) -> str:
    """Return the folder that the file of `data.tokenizer` is copied from; "" if it is local."""
    folder = tokenizer_path(value).rpartition("/")[0]
    is_elsewhere = is_url(folder) or (value.startswith(SCHEME) and not is_directory(folder))
    return folder if is_elsewhere else ""
