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
from maxpipe.config.shipped import SUFFIXES, config_root, locate_base, shown_path
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
HOMES = (
    "output_dir",
    "data.tokenizer",
    "data.chat_template",
    "pipeline.schedule",
    "compile.cache_dir",
    "compile.save",
    "compile.load",
)
_SCALAR_TAGS = {
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "null", "bool", "int", "float", "timestamp", "value")
}
_REFERENCE = re.compile(r"\$\{(\w+(?:\.\w+)*)\}")
_MAX_DEPTH = 12  # of lists and mappings in a value
_MAX_CHARACTERS = 1 << 20  # in a file


@dataclass(frozen=True)
class Setting:
    """A key, legal or not, with its value as written and its source.

    Attributes:
      key: the full key.
      raw: the value, not converted.
      source: `file.yml:12` or `command line`.
    """

    key: str
    raw: Raw
    source: str


def read_files(path: str) -> tuple[list[Setting], list[Problem]]:
    """Return the settings of a file and of the files it inherits from, the furthest base first."""
    chain: list[list[Setting]] = []
    problems: list[Problem] = []
    seen: list[str] = []
    origin = ""
    while path:
        if path in seen:
            problems.append(
                Problem("base", f"files inherit in a circle: {' -> '.join([*seen, path])}", origin)
            )
            break
        seen.append(path)
        try:
            settings = list(_read(path, origin))
        except ConfigError as error:
            problems.extend(error.problems)
            break
        problems.extend(_duplicates(settings))
        bases = [setting for setting in settings if setting.key == "base"]
        chain.append([setting for setting in settings if setting.key != "base"])
        directory, path = os.path.dirname(path), ""
        for base in bases:
            if isinstance(base.raw, Scalar) and base.raw.text:
                path, origin = locate_base(directory, base.raw.text), base.source
            else:
                problems.append(Problem("base", "expected the path of one YAML file", base.source))
    return [setting for settings in reversed(chain) for setting in settings], problems


def read_overrides(words: Sequence[str]) -> tuple[list[Setting], list[Problem]]:
    """Return the settings of `key=value` words, in their order."""
    settings: list[Setting] = []
    problems: list[Problem] = []
    for word in words:
        key, equals, text = word.partition("=")
        if word.endswith(SUFFIXES) and not equals:
            message = f"{word!r} is a second file; give one, which may inherit by `base: FILE`"
            problems.append(Problem("", message, COMMAND_LINE))
        elif not equals or not key.strip():
            problems.append(Problem("", f"{word!r} is not of the form key=value", COMMAND_LINE))
        elif key == "base":
            problems.append(
                Problem(
                    "base", "belongs in a YAML file; name the file itself instead", COMMAND_LINE
                )
            )
        elif key.startswith("-"):
            message = f"{word!r}: keys are written without dashes: {key.lstrip('-')}={text}"
            problems.append(Problem("", message, COMMAND_LINE))
        else:
            try:
                settings.extend(_override(key.strip(), text))
            except ConfigError as error:
                problems.extend(error.problems)
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


def nearest_files(path: str) -> list[str]:
    """Return up to three YAML files that a mistyped path may have meant, the most likely first.

    They are presets, and files next to the path or one folder below.
    """
    places = (Path(shown_path(config_root())), Path(os.path.dirname(path) or "."))
    patterns = [below + "*" + suffix for below in ("", "*/") for suffix in SUFFIXES]
    files = {os.path.normpath(p) for place in places for end in patterns for p in place.glob(end)}
    stem = Path(path).stem.lower()

    def likeness(file: str) -> float:
        return difflib.SequenceMatcher(None, Path(file).stem.lower(), stem).ratio()

    return sorted(files, key=lambda file: (-likeness(file), file))[:3]


def _read(path: str, origin: str) -> Iterator[Setting]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS + 1)
    except FileNotFoundError:
        near = nearest_files(path)
        hint = f"; the nearest are {', '.join(near)}" if near else ""
        raise ConfigError(Problem("", f"there is no file {path}{hint}", origin)) from None
    except UnicodeDecodeError as error:
        message = f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        raise ConfigError(Problem("", message, origin)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(Problem("", f"cannot read {path}: {error}", origin)) from None
    if len(text) > _MAX_CHARACTERS:
        message = f"{path} has more than {_MAX_CHARACTERS} characters; is it a configuration?"
        raise ConfigError(Problem("", message, origin))
    root = _compose(text, path)
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(Problem("", "a configuration is a mapping of keys to values", path))
    yield from _flatten(root, "", path)


def _compose(text: str, path: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark and path != COMMAND_LINE else path
        reason = error.problem or error.context or ""
        if "'\\t'" in reason:
            reason = "a tab where YAML allows only spaces"
        raise ConfigError(Problem("", f"not valid YAML: {reason}", where)) from None
    except (yaml.YAMLError, RecursionError) as error:
        message = f"not valid YAML: {str(error).splitlines()[0]}"
        raise ConfigError(Problem("", message, path)) from None


def _flatten(node: yaml.MappingNode, prefix: str, path: str) -> Iterator[Setting]:
    for key_node, value in node.value:
        source = f"{path}:{key_node.start_mark.line + 1}" if path != COMMAND_LINE else path
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(Problem("", "a key must be a word", source))
        if key_node.tag == "tag:yaml.org,2002:merge":
            raise ConfigError(
                Problem(
                    "", "YAML merge keys are not supported; inherit with `base: other.yml`", source
                )
            )
        key = prefix + key_node.value
        if key in SECTIONS and isinstance(value, yaml.MappingNode):
            yield from _flatten(value, key + ".", path)
        elif key in SECTIONS and isinstance(value, yaml.ScalarNode) and not value.value:
            continue
        else:
            yield Setting(key, _raw(value, source), source)


def _raw(node: yaml.Node, source: str, depth: int = 0) -> Raw:
    if depth > _MAX_DEPTH:
        raise ConfigError(Problem("", "a value is nested too deeply", source))
    if isinstance(node, yaml.ScalarNode) and node.tag in _SCALAR_TAGS:
        return Scalar(node.value, quoted=node.style is not None)
    if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        return [_raw(item, source, depth + 1) for item in node.value]
    if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
        names = [str(key.value) for key, _ in node.value]
        if twice := [name for number, name in enumerate(names) if name in names[:number]]:
            raise ConfigError(Problem("", f"{twice[0]} is set twice in one mapping", source))
        return {str(key.value): _raw(value, source, depth + 1) for key, value in node.value}
    raise ConfigError(Problem("", f"YAML tag {node.tag!r} is not allowed", source))


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

    Returns:
      The settings, and a problem for each setting that is left out because its reference is
      refused or leads nowhere.
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

    def text_of(match: re.Match[str]) -> str:
        value = _referred(match[1], chosen, path)
        if isinstance(value, Scalar):
            return value.text
        raise ValueError(f"{match[0]} is a list, which cannot be a part of a text")

    return replace(raw, text=_REFERENCE.sub(text_of, raw.text))


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
    located = {
        key: _at_home(setting) if key in HOMES else setting for key, setting in settings.items()
    }
    for key in (*LISTS, MIXTURE, *NAMES):
        setting = located.get(key)
        if setting is None or setting.source == COMMAND_LINE:
            continue
        directory = os.path.dirname(setting.source.rpartition(":")[0])
        if directory not in ("", "."):
            located[key] = replace(setting, raw=_locate(key, setting.raw, directory))
    return located


def _at_home(setting: Setting) -> Setting:
    if not isinstance(setting.raw, Scalar) or setting.raw.text == "~":
        return setting  # not one path; "~" alone is YAML's null. Both are refused later
    text = os.path.expanduser(setting.raw.text)
    return replace(setting, raw=replace(setting.raw, text=text))


def _locate(key: str, raw: Raw, directory: str) -> Raw:
    if isinstance(raw, list):
        return [_locate(key, item, directory) for item in raw]
    if isinstance(raw, dict):
        return raw | {
            name: _locate(key, item, directory) for name, item in raw.items() if name == "path"
        }
    if raw.text in NAMES.get(key, ()):
        return raw
    parts = [raw.text] if key in NAMES else raw.text.split(",")
    located = (_locate_one(part.strip(), directory, is_name=key in NAMES) for part in parts)
    return replace(raw, text=",".join(located))


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
    """Return whether there is a file or folder of that name, or a match of it as a pattern."""
    return os.path.exists(path) or next(glob.iglob(path, recursive=True), None) is not None
