"""Read YAML files and `key=value` words into settings with their sources; values are not checked.

A value may refer to another key as `${other.key}`. Other references, such as to the environment,
are refused: configs are written to disk, and secrets must not be.
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import yaml

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.options import OPTIONS, SECTIONS, unknown_key
from maxpipe.config.shipped import SUFFIXES, config_root, locate_base, shown_path
from maxpipe.config.values import Raw, Scalar

COMMAND_LINE = "command line"
_PATH_LISTS = ("data.path", "data.eval_path")
_SCALAR_TAGS = {
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "null", "bool", "int", "float", "timestamp", "value")
}
_MAX_DEPTH = 6
_MAX_BRACKETS = 200
_MAX_CHARACTERS = 1 << 20  # in a file, and in a value with its references followed
_MAX_VALUES = 10_000  # in one file, with aliases expanded
_MAX_NODES = 3 * _MAX_VALUES  # keys, values and their containers; PyYAML reads 20,000 a second
_REFERENCE = re.compile(r"\$\{[A-Za-z_]\w*(\.\w+)*\}")


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
    problems = []
    seen: dict[str, str] = {}
    for word in words:
        text = word.partition("=")[2]
        for key in dict.fromkeys(setting.key for setting in read_overrides([word])[0]):
            if key in seen:
                both = f"as one list: {key}={seen[key]},{text}" if key in _PATH_LISTS else "once"
                message = f"set twice, to {seen[key]!r} and {text!r}; give it {both}"
                problems.append(Problem(key, message, COMMAND_LINE))
            seen[key] = text
    return problems


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
    """Return up to three YAML files that a mistyped path may have meant, the most likely first."""
    presets, own = Path(shown_path(config_root())), Path(os.path.dirname(path) or ".")
    # All presets; but only one folder deep from where a mistyped path points, since that may be a
    # home directory.
    places = [(presets, "**/"), (own, ""), (own, "*/")]
    files = {
        os.path.normpath(p)
        for root, below in places
        for end in ("yml", "yaml")
        for p in root.glob(f"{below}*.{end}")
        if not any(part.startswith(".") for part in p.relative_to(root).parts)
    }
    stem = Path(path).stem.lower()

    def likeness(file: str) -> float:
        return difflib.SequenceMatcher(None, Path(file).stem.lower(), stem).ratio()

    return sorted(files, key=lambda file: (-likeness(file), file))[:3]


def _read(path: str, origin: str) -> Iterator[Setting]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS + 1)
        if len(text) > _MAX_CHARACTERS:
            message = f"{path} has more than {_MAX_CHARACTERS} characters; is it a configuration?"
            raise ConfigError(Problem("", message, origin))
    except ConfigError:
        raise
    except FileNotFoundError:
        near = nearest_files(path)
        hint = f"; the nearest are {', '.join(near)}" if near else ""
        raise ConfigError(Problem("", f"there is no file {path}{hint}", origin)) from None
    except UnicodeDecodeError as error:
        message = f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        raise ConfigError(Problem("", message, origin)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(Problem("", f"cannot read {path}: {error}", origin)) from None
    root = _compose(text, path)
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(Problem("", "a configuration is a mapping of keys to values", path))
    yield from _flatten(root, "", path)


class _TooManyNodes(Exception):
    """A file has more nodes than any configuration."""


class _Loader(yaml.SafeLoader):
    """Composes the nodes of a text, and stops at `_MAX_NODES` of them."""

    def __init__(self, text: str):
        super().__init__(text)
        self._num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node.

        Raises:
          _TooManyNodes: the text has more than `_MAX_NODES`.
        """
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise _TooManyNodes
        return super().compose_node(parent, index)


def _too_many_values(path: str) -> Problem:
    message = f"more than {_MAX_VALUES} values, aliases written out; is it a configuration?"
    return Problem("", message, path)


def _compose(text: str, path: str) -> yaml.Node | None:
    # PyYAML's time grows with the square of the depth.
    depth = accumulate(
        (character in "[{") - (character in "]}") for character in text if character in "[]{}"
    )
    if max(depth, default=0) > _MAX_BRACKETS:
        message = f"not valid YAML: more than {_MAX_BRACKETS} brackets are open at once"
        raise ConfigError(Problem("", message, path))
    try:
        return _Loader(text).get_single_node()
    except _TooManyNodes:
        raise ConfigError(_too_many_values(path)) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark and path != COMMAND_LINE else path
        reason = error.problem or error.context or ""
        if "'\\t'" in reason:
            reason = "a tab where YAML allows only spaces"
        raise ConfigError(Problem("", f"not valid YAML: {reason}", where)) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(
            Problem("", f"not valid YAML: {str(error).splitlines()[0]}", path)
        ) from None


def _flatten(node: yaml.MappingNode, prefix: str, path: str) -> Iterator[Setting]:
    if not prefix and _count_values(node, {}) > _MAX_VALUES:
        raise ConfigError(_too_many_values(path))
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


def _count_values(node: yaml.Node, known: dict[int, int], depth: int = 0) -> int:
    """Return the number of scalars below a node; an alias counts at each of its uses.

    Args:
      node: the node.
      known: counts by the node's `id`, extended here.
      depth: the node's depth; a node deeper than any configuration counts as 1 (refused later).
    """
    if isinstance(node, yaml.ScalarNode) or depth > 2 * _MAX_DEPTH:
        return 1
    if id(node) not in known:
        known[id(node)] = 1  # until counted: a node may contain itself, which is refused later
        items = node.value
        if isinstance(node, yaml.MappingNode):
            items = [item for pair in node.value for item in pair]
        known[id(node)] = sum(_count_values(item, known, depth + 1) for item in items)
    return known[id(node)]


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
            yield Problem(setting.key, f"set twice, first at {first[setting.key]}", setting.source)
        first.setdefault(setting.key, setting.source)


def follow_references(chosen: Mapping[str, Setting]) -> tuple[dict[str, Setting], list[Problem]]:
    """Replace references by the values of the keys they name.

    Returns:
      The settings, and a problem for each setting that is left out because its reference is
      refused or leads nowhere.
    """
    settings = dict(chosen)
    problems: list[Problem] = []
    for key, setting in chosen.items():
        if any("${" in _REFERENCE.sub("", text) for text in _texts(setting.raw)):
            problems.append(Problem(key, _refusal(setting.raw), setting.source))
            del settings[key]
        elif unknown := _unknown_references(setting.raw):
            problems += [Problem(key, message, setting.source) for message in unknown]
            del settings[key]
    lengths: dict[str, int] = {}
    for key, setting in list(settings.items()):
        if _length(key, settings, lengths) > _MAX_CHARACTERS:
            message = f"has more than {_MAX_CHARACTERS} characters with its references followed"
            problems.append(Problem(key, message, setting.source))
            del settings[key]
    if any("${" in text for setting in settings.values() for text in _texts(setting.raw)):
        problems += _resolve(settings)
    return settings, problems


def _length(key: str, settings: Mapping[str, Setting], known: dict[str, int]) -> int:
    """Return how long a value is with its references followed; a circle counts once.

    Args:
      key: the value's key.
      settings: all settings, by key.
      known: lengths by key, extended here.
    """
    if key not in known:
        known[key] = 0  # until counted: references may go in a circle
        texts = [*_texts(settings[key].raw)] if key in settings else []
        known[key] = sum(
            len(text)
            + sum(_length(match[0][2:-1], settings, known) for match in _REFERENCE.finditer(text))
            for text in texts
        )
    return known[key]


def _resolve(settings: dict[str, Setting]) -> list[Problem]:
    from omegaconf import OmegaConf  # 0.1 s that most configs need not pay
    from omegaconf.errors import OmegaConfBaseException

    tree = OmegaConf.create({})
    for key, option in OPTIONS.items():
        value = _plain(settings[key].raw) if key in settings else option.default
        OmegaConf.update(tree, key, value, force_add=True)
    problems = []
    for key, setting in list(settings.items()):
        if not any("${" in text for text in _texts(setting.raw)):
            continue
        try:
            value = OmegaConf.select(
                tree, key, throw_on_missing=True, throw_on_resolution_failure=True
            )
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
            settings[key] = replace(setting, raw=_raw_value(value))
        except (OmegaConfBaseException, RecursionError) as error:
            text = str(error).partition("\n")[0]
            is_circle = isinstance(error, RecursionError) or text.startswith("Recursive")
            reason = "references go in a circle" if is_circle else text
            problems.append(Problem(key, f"cannot follow the reference: {reason}", setting.source))
            del settings[key]
    return problems


def _unknown_references(raw: Raw) -> list[str]:
    references = [match[0] for text in _texts(raw) for match in _REFERENCE.finditer(text)]
    return [
        f"{reference}: {unknown_key(reference[2:-1])}"
        for reference in references
        if reference[2:-1] not in OPTIONS and reference[2:-1] not in SECTIONS
    ]


def _refusal(raw: Raw) -> str:
    if any("env" in text for text in _texts(raw)):
        return (
            "values from the environment are refused: "
            "the config is written to disk, and secrets must not be"
        )
    return "a reference has the form ${section.key}; nothing else is understood between the braces"


def _texts(raw: Raw) -> Iterator[str]:
    if isinstance(raw, Scalar):
        yield raw.text
    else:
        for item in raw if isinstance(raw, list) else raw.values():
            yield from _texts(item)


def _plain(raw: Raw) -> object:
    if isinstance(raw, Scalar):
        return raw.text
    if isinstance(raw, list):
        return [_plain(item) for item in raw]
    return {key: _plain(value) for key, value in raw.items()}


def _raw_value(value: object) -> Raw:
    if isinstance(value, list):
        return [_raw_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _raw_value(item) for key, item in value.items()}
    return Scalar("" if value is None else str(value))
