"""Read YAML files and `key=value` words into settings with their sources; values are not checked.

A value may refer to another key as `${other.key}`. Other references, such as to the environment,
are refused: configs are written to disk, and secrets must not be.
"""

import difflib
import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from maxpipe.config.catalog import SCHEDULES, TOKENIZERS
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.model_places import CHATML, split_scheme
from maxpipe.config.options import OPTIONS, SECTIONS, unknown_key
from maxpipe.config.shipped import SUFFIXES, locate_base, shipped_configs, shown_path
from maxpipe.config.values import Raw, Scalar

COMMAND_LINE = "command line"
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
_HOMES = (
    *("output_dir", "data.tokenizer", "data.chat_template", "pipeline.schedule"),
    *("compile.cache_dir", "compile.save", "compile.load"),
)
_PLAIN_TAGS = {
    yaml.ScalarNode: ("str", "null", "bool", "int", "float", "timestamp", "value"),
    yaml.SequenceNode: ("seq",),
    yaml.MappingNode: ("map",),
}
_REFERENCE = re.compile(r"\$\{(\w+(?:\.\w+)*)\}")
_MAX_DEPTH = 12  # of lists and mappings in a value
_MAX_CHARACTERS = 1 << 20  # in a file


@dataclass(frozen=True)
class Setting:
    """A key, legal or not, its value as written, and its source: `file.yml:12`, `command line`."""

    key: str
    raw: Raw
    source: str


def read_files(
    path: str, origin: str = "", outer: tuple[str, ...] = ()
) -> tuple[list[Setting], list[Problem]]:
    """Return the settings of a file and of the files it inherits from, the furthest base first.

    `origin` is where the file is named, in the last of the `outer` files.
    """
    if path in outer:
        message = f"files inherit in a circle: {' -> '.join([*outer, path])}"
        return [], [Problem("base", message, origin)]
    try:
        own = [*_read(path, origin)]
    except ConfigError as error:
        return [], [*error.problems]
    settings: list[Setting] = []
    problems = [*_duplicates(own)]
    for base in (setting for setting in own if setting.key == "base"):
        if isinstance(base.raw, Scalar) and base.raw.text:
            place = locate_base(os.path.dirname(path), base.raw.text)
            inherited, wrong = read_files(place, base.source, (*outer, path))
            settings += inherited
            problems += wrong
        else:
            problems.append(Problem("base", "expected the path of one YAML file", base.source))
    return [*settings, *(setting for setting in own if setting.key != "base")], problems


def read_overrides(words: Sequence[str]) -> tuple[list[Setting], list[Problem]]:
    """Return the settings of `key=value` words, in their order."""
    settings: list[Setting] = []
    problems: list[Problem] = []
    for word in words:
        key, equals, text = word.partition("=")
        if word.endswith(SUFFIXES) and not equals:
            message = "is a second file; give one, which may inherit by `base: FILE`"
        elif not equals or not key.strip():
            message = "is not of the form key=value"
        elif key == "base":
            message = "belongs in a YAML file; name the file itself instead"
        elif key.startswith("-"):
            message = f"has dashes; keys are written without dashes: {word.lstrip('-')}"
        else:
            try:
                settings.extend(_override(key.strip(), text))
            except ConfigError as error:
                problems.extend(error.problems)
            continue
        problems.append(Problem("", f"{word!r} {message}", COMMAND_LINE))
    return settings, problems


def repeated_words(words: Sequence[str]) -> list[Problem]:
    """Return a problem for each key that two `key=value` words of a command line set."""
    return [*_duplicates(read_overrides(words)[0])]


def split_values(text: str) -> list[str]:
    """Return the values of a word `key=a,b`; commas in brackets, braces or quotes do not split."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        depth += (character in "[{") - (character in "]}") if not quote else 0
        if character == "," and depth <= 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _read(path: str, origin: str) -> Iterator[Setting]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS + 1)
    except FileNotFoundError:
        own = {file.stem: file for file in Path(os.path.dirname(path)).glob("*.y*ml")}
        files = shipped_configs() | own
        near = difflib.get_close_matches(Path(path).stem.lower(), files, cutoff=0)
        hint = ", ".join(shown_path(files[stem]) for stem in near)
        message = f"there is no file {path}; the nearest are {hint}"
        raise ConfigError(Problem("", message, origin)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(Problem("", f"cannot read {path}: {reason}", origin)) from None
    if len(text) > _MAX_CHARACTERS:
        message = f"{path} has more than {_MAX_CHARACTERS} characters; is it a configuration?"
        raise ConfigError(Problem("", message, origin))
    root = _compose(text, path)
    if isinstance(root, yaml.MappingNode):
        yield from _flatten(root, "", path)
    elif root is not None:
        raise ConfigError(Problem("", "a configuration is a mapping of keys to values", path))


def _compose(text: str, path: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(yaml_problem(error, path)) from None


def yaml_problem(error: Exception, path: str) -> Problem:
    """Return the problem, with its line, of a file that is not valid YAML."""
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark and path != COMMAND_LINE else path
    reason = getattr(error, "problem", None) or str(error).splitlines()[0]
    if "'\\t'" in reason:
        reason = "a tab where YAML allows only spaces"
    return Problem("", f"not valid YAML: {reason}", where)


def _flatten(node: yaml.MappingNode, prefix: str, path: str) -> Iterator[Setting]:
    for key_node, value in node.value:
        source = f"{path}:{key_node.start_mark.line + 1}" if path != COMMAND_LINE else path
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(Problem("", "a key must be a word", source))
        if key_node.tag == "tag:yaml.org,2002:merge":
            message = "YAML merge keys are not supported; inherit with `base: other.yml`"
            raise ConfigError(Problem("", message, source))
        key = prefix + key_node.value
        if key in SECTIONS and isinstance(value, yaml.MappingNode):
            yield from _flatten(value, key + ".", path)
        elif key not in SECTIONS or not isinstance(value, yaml.ScalarNode) or value.value:
            yield Setting(key, _raw(value, source), source)


def _raw(node: yaml.Node, source: str, depth: int = 0) -> Raw:
    if depth > _MAX_DEPTH:
        raise ConfigError(Problem("", "a value is nested too deeply", source))
    if node.tag.removeprefix("tag:yaml.org,2002:") not in _PLAIN_TAGS[type(node)]:
        raise ConfigError(Problem("", f"YAML tag {node.tag!r} is not allowed", source))
    if isinstance(node, yaml.ScalarNode):
        return Scalar(node.value, quoted=node.style is not None)
    if isinstance(node, yaml.SequenceNode):
        return [_raw(item, source, depth + 1) for item in node.value]
    values = {str(key.value): _raw(value, source, depth + 1) for key, value in node.value}
    if len(values) < len(node.value):
        raise ConfigError(Problem("", "a key is set twice in one mapping", source))
    return values


def _override(key: str, text: str) -> Iterator[Setting]:
    option = OPTIONS.get(key)
    collection = text.lstrip().startswith(("[", "{")) and not (option and option.type is str)
    node = _compose(text, COMMAND_LINE) if collection else None
    if isinstance(node, yaml.MappingNode) and key in SECTIONS:
        yield from _flatten(node, key + ".", COMMAND_LINE)
    elif node is not None:
        yield Setting(key, _raw(node, COMMAND_LINE), COMMAND_LINE)
    else:
        quoted = re.fullmatch(r"(['\"])(.*)\1", text, re.DOTALL)
        yield Setting(key, Scalar(quoted[2], quoted=True) if quoted else Scalar(text), COMMAND_LINE)


def _duplicates(settings: Sequence[Setting]) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for setting in settings:
        if setting.key in first:
            remedy = f"as one list: {setting.key}=a,b" if setting.key in LISTS else "once"
            message = f"set twice, first at {first[setting.key]}; give it {remedy}"
            yield Problem(setting.key, message, setting.source)
        first.setdefault(setting.key, setting.source)


def follow_references(chosen: Mapping[str, Setting]) -> tuple[dict[str, Setting], list[Problem]]:
    """Replace references by the values of the keys they name.

    Settings whose reference is refused or leads nowhere become problems.
    """
    settings: dict[str, Setting] = {}
    problems: list[Problem] = []
    for key, setting in chosen.items():
        try:
            settings[key] = replace(setting, raw=_followed(setting.raw, chosen, (key,)))
        except ValueError as error:
            problems.append(Problem(key, str(error), setting.source))
    return settings, problems


def _followed(raw: Raw, chosen: Mapping[str, Setting], path: tuple[str, ...]) -> Raw:
    """Return a value without references; `path` has the keys that have led to it.

    Raises:
      ValueError: a reference is refused, or leads nowhere or in a circle.
    """
    if isinstance(raw, list):
        return [_followed(item, chosen, path) for item in raw]
    if isinstance(raw, dict):
        return {name: _followed(item, chosen, path) for name, item in raw.items()}
    if "${" in _REFERENCE.sub("", raw.text):
        raise ValueError(
            "a reference has the form ${section.key}; all else is refused, such as values from the "
            "environment: the config is written to disk, and secrets must not be"
        )
    if whole := _REFERENCE.fullmatch(raw.text):
        return _referred(whole[1], chosen, path)
    text = ""
    for number, part in enumerate(_REFERENCE.split(raw.text)):  # texts and keys in turn
        value = _referred(part, chosen, path) if number % 2 else Scalar(part)
        if not isinstance(value, Scalar):
            raise ValueError(f"${{{part}}} is a list, which cannot be a part of a text")
        text += value.text
    return replace(raw, text=text)


def _referred(key: str, chosen: Mapping[str, Setting], path: tuple[str, ...]) -> Raw:
    if key in SECTIONS:
        raise ValueError(f"${{{key}}} is a section; a key takes a value, not a section")
    if key not in OPTIONS:
        raise ValueError(f"${{{key}}}: {unknown_key(key)}")
    if key in path:
        raise ValueError(f"references go in a circle: {' -> '.join((*path, key))}")
    if key in chosen:
        return _followed(chosen[key].raw, chosen, (*path, key))
    return _raw_of(OPTIONS[key].default)


def _raw_of(value: object) -> Raw:
    return [_raw_of(item) for item in value] if isinstance(value, list) else Scalar(str(value))


def locate(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return the settings with paths of files relative to the working directory, and no `~`."""
    located = {}
    for key, setting in settings.items():
        directory = os.path.dirname(setting.source.rpartition(":")[0])  # "" of the command line
        located[key] = replace(setting, raw=_locate(key, setting.raw, directory))
    return located


def _locate(key: str, raw: Raw, directory: str) -> Raw:
    if isinstance(raw, list):
        return [_locate(key, item, directory) for item in raw]
    if isinstance(raw, dict):
        return raw | {n: _locate(key, item, directory) for n, item in raw.items() if n == "path"}
    is_home = key in _HOMES and not raw.is_null  # "~" alone is YAML's null, and refused later
    text = os.path.expanduser(raw.text) if is_home else raw.text
    if key in (*LISTS, MIXTURE, *NAMES) and directory and text not in NAMES.get(key, ()):
        parts = [text] if key in NAMES else text.split(",")
        text = ",".join(_locate_one(p.strip(), directory, is_name=key in NAMES) for p in parts)
    return replace(raw, text=text)


def _locate_one(path: str, directory: str, is_name: bool) -> str:
    scheme, folder = split_scheme(path)
    if not folder or os.path.isabs(folder) or folder.startswith(("~", ":")) or "://" in folder:
        return path
    # In a list `hf:` is a data set, whose configuration and split follow after colons.
    name = folder.partition(":")[0] if scheme and not is_name else folder
    located = os.path.normpath(os.path.join(directory, name))
    if not os.path.exists(located):
        located = os.path.normpath(os.path.join(glob.escape(directory), name))
    return scheme + located + folder.removeprefix(name) if exists(located) else path


def exists(path: str) -> bool:
    """Return whether there is a file or folder of that name, or a match of it as a pattern; the
    name may lack `.bin`, as Megatron-LM's do.
    """
    names = (path, path + ".bin")
    return any(os.path.exists(n) or next(glob.iglob(n, recursive=True), None) for n in names)
