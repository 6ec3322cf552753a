"""Match the tensors of files with a model's: other names, unused parts, differences."""

from collections.abc import Iterator, Mapping
from contextlib import suppress

import numpy as np

from maxpipe.config.errors import Problem
from maxpipe.config.from_hf import TIED, VOCABULARY, Shape
from maxpipe.config.model_places import open_folder
from maxpipe.config.options import get
from maxpipe.config.sections import Config
from maxpipe.hf.safetensors import SafetensorsError, WeightTensor, read_folder

# Prefixes of a multimodal model's text part, and of its other parts.
_TEXT_PARTS = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_OTHER_PARTS = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
HEAD = "lm_head.weight"
_ROWS = 4096  # that are compared at a time
_SELECTION_BIAS = "model.moe.selection_bias"  # implied by a bias rate
_FLOATS = ("F32", "F16", "BF16", "MXFP4", "FP8")


def shape_problems(config: Config, shape: Shape, directory: str) -> list[Problem]:
    """Return a problem for each key that differs from the directory's config.json."""
    remedy = f"model.from_hf={directory} takes the shape from there"
    return [
        Problem(key, f"is {get(config, key)}, but {shape.source} says {value}; {remedy}")
        for key, value in shape.values.items()
        if get(config, key) != value
        and not (key == _SELECTION_BIAS and config.model.moe.has_bias == value)
        and not (key == TIED and value)  # untied: the files have a head
        and not (key == VOCABULARY and get(config, key) > value)  # padded
    ]


def text_name(name: str) -> str:
    """Return a tensor's name as text-only models have it, if it is of a multimodal model."""
    for theirs, ours in _TEXT_PARTS.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def is_ignored(name: str, num_layers: int, tied: bool) -> bool:
    """Return whether a tensor plays no part in the model: it is derived, or belongs elsewhere."""
    if name.endswith("rotary_emb.inv_freq") or name.startswith(_OTHER_PARTS):
        return True
    if tied and name == HEAD:
        return True
    parts = name.split(".")
    # Layers for multi-token prediction follow the model's own.
    is_layer = parts[:2] == ["model", "layers"] and parts[2:3] and parts[2].isdigit()
    return bool(is_layer) and int(parts[2]) >= num_layers


def has_own_head(tensors: Mapping[str, WeightTensor]) -> bool:
    """Return whether the output projection in files is another matrix than the embedding table;
    then transformers 5 does not tie the two, whatever config.json says.
    """
    head, table = tensors.get(HEAD), tensors.get("model.embed_tokens.weight")
    if head is None or table is None or head.shape != table.shape or len(head.shape) != 2:
        return False
    for first in range(0, head.shape[0], _ROWS):
        end = min(first + _ROWS, head.shape[0])
        rows, own = (x.read_rows(first, end).astype(np.float32) for x in (table, head))
        if not np.array_equal(rows, own):
            return True
    return False


def unties(value: str) -> bool:
    """Return whether the files in the folder of an `init_from` untie what config.json ties."""
    with suppress(SafetensorsError, OSError):  # which the import names
        tensors = read_folder(open_folder(value, "init_from"))
        return has_own_head({text_name(name): tensor for name, tensor in tensors.items()})
    return False


def differences(
    stored: Mapping[str, WeightTensor], expected: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """Yield a line for every tensor that is missing, unknown, or of another shape or dtype."""
    for name in sorted(expected.keys() - stored.keys()):
        yield f"{name} is missing"
    for name in sorted(stored.keys() - expected.keys()):
        yield f"{name} is not part of the model"
    for name in sorted(stored.keys() & expected.keys()):
        tensor = stored[name]
        if tensor.shape != expected[name]:
            yield f"{name} has shape {list(tensor.shape)}, the model {list(expected[name])}"
        elif tensor.dtype not in _FLOATS:
            yield f"{name} is {tensor.dtype}; only {', '.join(_FLOATS)} are read"
