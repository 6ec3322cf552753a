"""Take from the base model what belongs together: its shape, weights, tokenizer and chat template.

`base_model` names all of them at once. Without it, a run that starts from `init_from` or
`model.from_hf` still gets the base's tokenizer, unless `data.tokenizer` is set.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from maxpipe.config import from_hf
from maxpipe.config.catalog import SOURCES, DataSource
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.files import COMMAND_LINE, read_files
from maxpipe.config.identity import SHAPE_DEFAULTS
from maxpipe.config.imports import attribute_of
from maxpipe.config.model_places import (
    SCHEME,
    TOKENIZER,
    folder_of,
    is_directory,
    is_url,
    maxtext_directory,
    open_folder,
    run_of,
)
from maxpipe.config.options import OPTIONS
from maxpipe.config.values import convert

KEY = "base_model"
_WEIGHTS, _TOKENIZER, _TEMPLATE = "init_from", "data.tokenizer", "data.chat_template"
_LENGTH = "data.sequence_length"
_TOKENIZER_CONFIG, _TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"


class _Chosen(NamedTuple):
    """The values that are set, by key, and where each comes from."""

    values: dict[str, Any]
    sources: dict[str, str]

    def text(self, key: str) -> str:
        return str(self.values.get(key, OPTIONS[key].default))

    def set(self, key: str, value: object, source: str) -> None:
        self.values[key], self.sources[key] = value, source

    def stands(self, key: str, named_by: str) -> bool:
        """Return whether a key is set on the command line, or in the file that sets `named_by`."""
        source = self.sources.get(key, "")
        file = self.sources.get(named_by, "").rpartition(":")[0]
        return source == COMMAND_LINE or bool(file and source.rpartition(":")[0] == file)

    def take(self, shape: from_hf.Shape, named_by: str) -> list[Problem]:
        """Set the keys of a shape, whose place another key names; files have weaker ones.

        Those that the command line contradicts are problems.
        """
        problems = []
        for key, value in shape.values.items():
            own = self.values.get(key, value)
            is_flag = key in self.values and self.sources.get(key) == COMMAND_LINE
            # The file that names the folder may give the vocabulary more rows, too.
            has_more_rows = key == from_hf.VOCABULARY and self.stands(key, named_by) and own > value
            if has_more_rows or (key == from_hf.TIED and is_flag and value):
                continue
            is_derived = OPTIONS[key].bounds.derived and own == -1
            if is_flag and own != value and not is_derived:
                message = f"is {own}, but {shape.source} says {value}; leave the key out"
                problems.append(Problem(key, message, COMMAND_LINE))
            self.set(key, value, shape.source)
        return problems


def apply(
    values: Mapping[str, object], sources: Mapping[str, str]
) -> tuple[dict[str, object], dict[str, str], list[Problem]]:
    """Add what the base model decides to the values that are set, and their sources.

    A key on the command line, or in the file that sets `base_model`, may only agree with the base.
    Keys in other files are overridden, except for the tokenizer: a run that starts compares it with
    the base's.
    """
    chosen, problems = _Chosen({**values}, {**sources}), list[Problem]()
    base = chosen.text(KEY)
    try:
        for key, value in (_places(base) if base else {}).items():
            if chosen.stands(key, KEY) and chosen.values[key] != value:
                message = f"is {chosen.values[key]!r}, but {KEY}={base} sets it: leave one out"
                raise ConfigError(Problem(key, message, chosen.sources[key]))
            chosen.set(key, value, base)
        if run := run_of(base):
            problems = chosen.take(_shape_of(run), KEY)
        elif folder := chosen.text(from_hf.KEY):
            shape = from_hf.read_shape(folder, KEY if base else from_hf.KEY)
            _untie(chosen, shape)
            problems = chosen.take(shape, from_hf.KEY)
        _take_tokenizer(chosen)
        if base and not chosen.stands(_TEMPLATE, KEY):
            _take_template(base, chosen)
    except ConfigError as error:
        problems += error.problems
    return chosen.values, chosen.sources, problems


def remarks(values: Mapping[str, object]) -> list[str]:
    """Return notes for the user on what the files of the base leave open, after `apply`."""
    init_from, folder = (str(values.get(key, "")) for key in (_WEIGHTS, from_hf.KEY))
    lines, run = list[str](), run_of(init_from)
    learned = _settings_of(run).get(_LENGTH) if run else None
    if folder:
        conflicts = attribute_of("maxpipe.hf.rope:rope_conflicts")
        content = from_hf.read_config_json(folder)
        lines = [f"{from_hf.KEY}: {from_hf.FILE}: {line}" for line in conflicts(content)]
        learned = content.get("max_position_embeddings") if init_from else None
    length = values.get(_LENGTH, OPTIONS[_LENGTH].default)
    if isinstance(length, int) and isinstance(learned, int) and length > learned:
        lines.append(
            f"{_LENGTH}={length} is longer than the base's {learned}: it knows no later position"
        )
    if (init_from or folder) and _needs_tokenizer(values):
        default = OPTIONS[_TOKENIZER].default
        lines.append(f"{_TOKENIZER}={default}: {init_from or folder} has none that can be read")
    return lines


def base_tokenizer(init_from: str, folder: str) -> str:
    """Return the value of `data.tokenizer` that a base brings with it, "" if it has none.

    Weights that come without one are those of `folder`, the value of `model.from_hf`.

    Raises:
      ConfigError: the configuration of the run to start from cannot be read.
    """
    if run := run_of(init_from):
        kept = sorted((_root(run) / "tokenizer").glob("*.*"))
        files = [file for file in kept if file.name not in (_TOKENIZER_CONFIG, _TEMPLATE_FILE)]
        return str(files[0] if files else _settings_of(run).get(_TOKENIZER, ""))
    is_own = bool(init_from) and not maxtext_directory(init_from)
    folder = folder_of(init_from if is_own else folder)
    if not folder or is_url(folder):
        return folder
    pieces = Path(folder, "tokenizer.model")
    if is_directory(folder) and not Path(folder, TOKENIZER).is_file():
        return str(pieces) if pieces.is_file() else ""
    return SCHEME + folder


def _places(base: str) -> dict[str, object]:
    if run_of(base):
        return {_WEIGHTS: base, from_hf.KEY: ""}
    if base == SCHEME or not (is_url(base) or base.startswith(SCHEME)):
        message = f"{base!r} has none of the forms hf:DIR, hf:org/name, run:DIR, s3://, gs://"
        raise ConfigError(Problem(KEY, message))
    return {_WEIGHTS: base, from_hf.KEY: base}


def _shape_of(run: str) -> from_hf.Shape:
    settings, file = _settings_of(run), str(_root(run) / "config.yml")
    if not settings:
        message = f"there is no {file}; give the directory of a run, output_dir/run_name"
        raise ConfigError(Problem(KEY, message))
    defaults = {"block": OPTIONS["model.block"].default, **SHAPE_DEFAULTS}
    shape = {f"model.{name}": default for name, default in defaults.items()}
    return from_hf.Shape("", {key: settings.get(key, shape[key]) for key in shape}, file)


def _untie(chosen: _Chosen, shape: from_hf.Shape) -> None:
    """Let the head be a matrix of its own if local files have another one, as in transformers 5.

    A run that has begun keeps what it began with.
    """
    base, tied = chosen.text(_WEIGHTS), from_hf.TIED
    if not shape.values[tied] or not base.startswith(SCHEME) or not is_directory(folder_of(base)):
        return
    begun = _settings_of_begun(chosen)
    is_tied = begun[tied] if tied in begun else not attribute_of("maxpipe.hf.matching:unties")(base)
    shape.values[tied] = is_tied


def _settings_of_begun(chosen: _Chosen) -> Mapping[str, object]:
    own = Path(chosen.text("output_dir"), chosen.text("run_name"))
    is_begun = next(own.glob("checkpoints/[0-9]*"), None) is not None
    return _settings_of(str(own)) if is_begun else {}


def _take_tokenizer(chosen: _Chosen) -> None:
    init_from, folder = chosen.text(_WEIGHTS), chosen.text(from_hf.KEY)
    if not (init_from or folder) or not _needs_tokenizer(chosen.values):
        return
    tokenizer = _settings_of_begun(chosen).get(_TOKENIZER) or base_tokenizer(init_from, folder)
    if tokenizer := tokenizer or chosen.text(KEY):  # files that it lacks are named at reading
        chosen.set(_TOKENIZER, tokenizer, init_from or folder)


def _needs_tokenizer(values: Mapping[str, object]) -> bool:
    return _TOKENIZER not in values and any(s.needs_tokenizer for s in _sources(values))


def _take_template(base: str, chosen: _Chosen) -> None:
    is_chat = any(source.is_chat for source in _sources(chosen.values))
    if not is_chat or chosen.values.get(_TOKENIZER) != base_tokenizer(base, ""):
        return
    kept = _root(run_of(base)) / "tokenizer"
    folder = open_folder(str(kept) if run_of(base) else base, KEY)
    template = None
    with suppress(FileNotFoundError, ValueError, AttributeError):
        template = json.loads(folder.read(_TOKENIZER_CONFIG)).get("chat_template") and ""
    with suppress(FileNotFoundError):
        folder.read(_TEMPLATE_FILE)
        template = str(kept / _TEMPLATE_FILE) if run_of(base) else ""
    if template is not None:
        chosen.set(_TEMPLATE, template, base)


def _sources(values: Mapping[str, object]) -> Iterator[DataSource]:
    mixture = values.get("data.mixture")
    entries = mixture if isinstance(mixture, list) else []
    names = [entry.get("source") for entry in entries if isinstance(entry, Mapping)]
    for name in names or [values.get("data.source", OPTIONS["data.source"].default)]:
        if str(name) in SOURCES:
            yield SOURCES[str(name)]


def _root(run: str) -> Path:
    return Path(run).parent if Path(run).name == "checkpoints" else Path(run)


def _settings_of(run: str) -> dict[str, object]:
    file = _root(run) / "config.yml"
    settings, problems = read_files(str(file)) if file.is_file() else ([], [])
    if problems:
        raise ConfigError(*(Problem(KEY, problem.message, problem.source) for problem in problems))
    values = {}
    for setting in settings:
        if setting.key in OPTIONS:
            with suppress(ValueError):  # of another version
                values[setting.key] = convert(OPTIONS[setting.key], setting.raw)
    return values
