"""Make paths in a YAML file relative to that file, and a leading `~` the home directory.

Paths on the command line stay relative to the working directory.

A relative path that does not exist next to its file stays relative to the working directory, as all
paths were in earlier versions.
"""

import glob
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from maxpipe.config.catalog import SCHEDULES, TOKENIZERS
from maxpipe.config.files import COMMAND_LINE, Setting
from maxpipe.config.model_places import CHATML, split_scheme
from maxpipe.config.values import Raw, Scalar

# Keys of what a run reads. Directories that it writes to stay relative to the working directory.
LISTS = ("data.path", "data.eval_path")  # paths and globs, separated by commas
MIXTURE = "data.mixture"
NAMES: Mapping[str, Mapping[str, object]] = {  # a name in the catalogue, or a path
    "data.tokenizer": TOKENIZERS,
    "data.chat_template": {CHATML: None},
    "base_model": {},
    "init_from": {},
    "model.from_hf": {},
    "pipeline.schedule": SCHEDULES,
}
# Keys of one path in which no reader expands "~": output_dir=~/runs would make a directory "~".
HOMES = (
    "output_dir",
    "data.tokenizer",
    "data.chat_template",
    "pipeline.schedule",
    "compile.cache_dir",
    "compile.save",
    "compile.load",
)


class Located(NamedTuple):
    """Settings whose paths are relative to the working directory, and remarks for the user."""

    settings: dict[str, Setting]
    remarks: tuple[str, ...]


def locate(settings: Mapping[str, Setting]) -> Located:
    """Return the settings with paths of files relative to the working directory, and no `~`."""
    located = {
        key: _at_home(setting) if key in HOMES else setting for key, setting in settings.items()
    }
    remarks: list[str] = []
    for key in (*LISTS, MIXTURE, *NAMES):
        setting = located.get(key)
        if setting is None or setting.source == COMMAND_LINE:
            continue
        directory = os.path.dirname(setting.source.rpartition(":")[0])
        if directory not in ("", "."):
            located[key] = replace(setting, raw=_locate(key, setting.raw, directory, remarks))
    return Located(located, tuple(remarks))


def _at_home(setting: Setting) -> Setting:
    if not isinstance(setting.raw, Scalar) or setting.raw.text == "~":
        return setting  # not one path; "~" alone is YAML's null. Both are refused later
    text = os.path.expanduser(setting.raw.text)
    return replace(setting, raw=replace(setting.raw, text=text))


def _locate(key: str, raw: Raw, directory: str, remarks: list[str]) -> Raw:
    if isinstance(raw, list):
        return [_locate(key, item, directory, remarks) for item in raw]
    if isinstance(raw, dict):
        path = raw.get("path")
        located = {} if path is None else {"path": _locate(key, path, directory, remarks)}
        return {**raw, **located}
    if raw.text in NAMES.get(key, ()):
        return raw
    parts = [raw.text] if key in NAMES else raw.text.split(",")
    return replace(
        raw, text=",".join(_locate_one(key, part.strip(), directory, remarks) for part in parts)
    )


def _locate_one(key: str, path: str, directory: str, remarks: list[str]) -> str:
    scheme, folder = split_scheme(path)
    if not folder or os.path.isabs(folder) or folder.startswith(("~", ":")) or "://" in folder:
        return path
    # In a list `hf:` is a data set, whose configuration and split follow after colons.
    name = folder.partition(":")[0] if scheme and key not in NAMES else folder
    located = os.path.normpath(os.path.join(directory, name))
    if not os.path.exists(located):
        located = os.path.normpath(os.path.join(glob.escape(directory), name))
    if not exists(located):
        return path
    if exists(name):
        remarks.append(
            f"{key}={scheme}{located}: paths in a file are relative to it; {name} in the working "
            "directory is not read"
        )
    return scheme + located + folder.removeprefix(name)


def exists(path: str) -> bool:
    """Return whether there is a file or folder of that name, or a match of it as a pattern."""
    return os.path.exists(path) or next(glob.iglob(path, recursive=True), None) is not None
