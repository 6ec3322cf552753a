"""Read a MaxText configuration as MaxText does: base.yml, the model's file, `key=value` words."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from maxpipe.config.errors import Problem
from maxpipe.config.files import repeated_words, yaml_problem
from maxpipe.config.maxtext import SAME_NAMES, Value
from maxpipe.config.options import OPTIONS

COMMAND_LINE = "command line"
BASE = "base.yml"
_MOST_CHOSEN = 300  # keys of a user's own file; a copy of base.yml has more
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")  # YAML 1.1 takes 1e-5 for a text


@dataclass(frozen=True)
class MaxTextConfig:
    """The values of MaxText's keys, None where MaxText has None, null or an empty text.

    `chosen` has the file, or `command line`, of keys that the user's own file, the model's file or
    the command line set: all but those of base.yml, which sets every key of MaxText.
    Problems are words that are not `key=value` or contradict the model's file.
    `words` set keys of maxpipe. `unread` has the files that cannot be read: values are missing.
    """

    values: Mapping[str, Value]
    chosen: Mapping[str, str]
    problems: tuple[Problem, ...] = ()
    words: tuple[str, ...] = ()
    unread: tuple[Problem, ...] = ()


def read_maxtext(files: Sequence[str], words: Sequence[str]) -> MaxTextConfig:
    """Return the values of a MaxText command line.

    Precedence, weakest first: MaxText's defaults, `base_config` of base.yml, base.yml, the model's
    file, the words. Words change what the model's file sets only with `override_model_config=true`.

    Args:
      files: base.yml, optionally followed by a model's file; without one, `model_name` finds it in
        the directory `models` next to base.yml or one level up.
      words: words of the form `key=value`; keys with a dot, or that only maxpipe has, are its own.
    """
    own_keys = OPTIONS.keys() - {*SAME_NAMES}
    ours = [w for w in words if "." in (key := w.partition("=")[0]) or key in own_keys]
    overrides, problems = _read_words([word for word in words if word not in ours])
    problems += repeated_words(words)
    if len(files) > 2:
        message = f"expected base.yml and one model's file, got {', '.join(files)}"
        problems.append(Problem("", message))
    unread: list[Problem] = []
    chosen: dict[str, str] = {}
    base = _read_with_bases(files[0], (), unread, chosen) if files else {}
    name = overrides.get("model_name", base.get("model_name"))
    model_file = files[1] if len(files) > 1 else _find_model(files, name, unread)
    model = _read(model_file, unread) if model_file else {}
    if len(files) > 1 and overrides.get("model_name") is None:
        base["model_name"] = os.path.splitext(os.path.basename(files[1]))[0]
    replaces = overrides.get("override_model_config", base.get("override_model_config"))
    for key in model:
        contradicts = key in overrides and not same_value(overrides[key], model[key])
        if contradicts and not replaces:
            message = f"is {model[key]} in {model_file}; to change it, set"
            problems.append(Problem(key, f"{message} override_model_config=true as well"))
    chosen |= dict.fromkeys(model, model_file) | dict.fromkeys(overrides, COMMAND_LINE)
    values = base | model | overrides
    return MaxTextConfig(values, chosen, tuple(problems), tuple(ours), tuple(unread))


def same_value(a: Value, b: Value) -> bool:
    """Return whether two values mean the same: 1 and 1.0, but not 1 and true; 0, off and empty."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b or (a is None and b is False) or (b is None and a is False)
    return a == b or (a in (None, []) and b in (None, []))


def _find_model(files: Sequence[str], name: Value, unread: list[Problem]) -> str:
    """Return the path of a model's file; empty for MaxText's model `default`, or without a file."""
    if name in (None, "default"):
        return ""
    file = os.path.join("models", f"{str(name).replace('-Instruct', '')}.yml")
    if not files:
        message = f"{name} needs the path of MaxText's base.yml, near which {file} lies"
        unread.append(Problem("model_name", message))
        return ""
    places = _places(files[0], file)
    path = next(filter(os.path.isfile, places), "")
    if not path:
        message = f"there is neither {' nor '.join(places)}; give its path after {files[0]}"
        unread.append(Problem("model_name", message))
    return path


def _places(path: str, name: str) -> list[str]:
    """Return where MaxText looks for a file that another one names: next to it, or one level up."""
    directory = os.path.dirname(os.path.abspath(path))
    return [os.path.join(place, name) for place in (directory, os.path.dirname(directory))]


def _read_with_bases(
    path: str, inner: tuple[str, ...], unread: list[Problem], chosen: dict[str, str]
) -> dict[str, Value]:
    """Return the values of a file and those it inherits; add its own keys to `chosen`."""
    if path in inner:
        unread.append(Problem("base_config", "files inherit in a circle", path))
        return {}
    values = _read(path, unread)
    base = values.pop("base_config", None)
    if os.path.basename(path) != BASE and len(values) <= _MOST_CHOSEN:
        chosen |= dict.fromkeys(values, path) | chosen
    if base is None:
        return values
    places = _places(path, str(base))
    file = next(filter(os.path.isfile, places), "")
    if not file:
        message = f"there is neither {' nor '.join(places)}; give its path, or leave it out: "
        unread.append(Problem("base_config", f"{message}MaxText's defaults apply", path))
        return values
    return _read_with_bases(file, (*inner, path), unread, chosen) | values


def _read(path: str, unread: list[Problem]) -> dict[str, Value]:
    """Return the values of a file; none, and a problem in `unread`, if it cannot be read."""
    problem = Problem("", f"{path} is not a mapping of keys to values")
    content = None
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        problem = Problem("", f"cannot read {path}: {error.strerror}")
    except (yaml.YAMLError, ValueError) as error:
        problem = yaml_problem(error, path)
    if not isinstance(content, dict):
        unread.append(problem)
        return {}
    return {str(key): _value(value) for key, value in content.items()}


def _read_words(words: Sequence[str]) -> tuple[dict[str, Value], list[Problem]]:
    values: dict[str, Value] = {}
    problems: list[Problem] = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            problems.append(Problem("", f"{word!r} is not of the form key=value"))
            continue
        try:
            values[key] = _value(yaml.safe_load(text))
        except (yaml.YAMLError, ValueError):
            values[key] = text  # such as *.parquet, which YAML takes for an alias
    return values, problems


def _value(value: object) -> Value:
    """Return a value as MaxText takes it: null, None and the empty text are one, 1e-5 a number."""
    if isinstance(value, list):
        return value
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    if text.lower() in ("", "none"):
        return None
    return float(text) if _EXPONENT.fullmatch(text) else text
