"""Read the shape of a model from its config.json, such as that of `model.from_hf`."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from maxpipe.config.catalog import MODEL_TYPES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import implementation
from maxpipe.config.model_places import open_folder
from maxpipe.config.options import OPTIONS
from maxpipe.config.values import check_bounds, check_type, is_finite, nearest

KEY = "model.from_hf"
FILE = "config.json"
_TEXT = "text_config"
TIED = "model.tie_embeddings"  # may be false for files that have an output projection
VOCABULARY = "model.vocab_size"  # may be larger than the file's
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys of its text part that a model with images may give outside that part
_OF_BOTH = ("tie_word_embeddings", *SPECIAL_IDS)


class Shape(NamedTuple):
    """A Hugging Face model: its `model_type`, its values by full key, and the file."""

    model_type: str
    values: dict[str, Any]
    source: str


def read_shape(folder: str, key: str = KEY) -> Shape:
    """Read the config.json of a folder, as a key such as `init_from` names it; raises ConfigError
    if there is none, or its model cannot be expressed.
    """
    c, source = _read_file(folder, key)
    model_type = str(c.get("model_type"))
    if model_type not in MODEL_TYPES:
        message = (
            f"{source} has model_type {model_type!r}, which is not one of "
            f"{', '.join(MODEL_TYPES)}{nearest(model_type, [*MODEL_TYPES])}"
        )
        raise ConfigError(Problem(key, message))
    try:
        if wrong := [k for k, v in c.items() if isinstance(v, int | float) and not is_finite(v)]:
            raise ValueError(f"{', '.join(wrong)} must be finite")
        values = implementation(MODEL_TYPES[model_type])().model(c)
        _check(values)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(Problem(key, f"{source} of a {model_type}: {reason}")) from None
    return Shape(model_type, {f"model.{key}": value for key, value in values.items()}, source)


def _check(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        option = OPTIONS[f"model.{name}"]
        try:
            check_type(option, value)
            check_bounds(option, value)
            if isinstance(value, float) and not is_finite(value):
                raise ValueError(f"must be finite; got {value}")
        except ValueError as error:
            raise ValueError(f"{option.key} {error}") from None


def read_config_json(folder: str, key: str = KEY) -> dict[str, Any]:
    """Return a folder's config.json; for a model with images, its text part and special ids.
    Raises ConfigError if it cannot be read.
    """
    return _read_file(folder, key)[0]


def _read_file(value: str, key: str) -> tuple[dict[str, Any], str]:
    folder = open_folder(value, key)
    source = f"{folder}/{FILE}"
    try:
        content = json.loads(folder.read(FILE))
    except FileNotFoundError:
        message = f"there is no {source}; give a folder with the files of a model"
        raise ConfigError(Problem(key, message)) from None
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(Problem(key, f"cannot read {source}: {error}")) from None
    if not isinstance(content, dict):
        raise ConfigError(Problem(key, f"{source} is not a JSON object"))
    text = content.get(_TEXT)
    if isinstance(text, dict) and is_text_a_part(content):
        outer = {key: content[key] for key in _OF_BOTH if text.get(key) is None and key in content}
        content = {**text, **outer}
    return content, source


def is_text_a_part(content: Mapping[str, object]) -> bool:
    """Return whether a config.json is of a model whose text part is one of several."""
    return isinstance(content.get(_TEXT), dict) and content.get("model_type") not in MODEL_TYPES
