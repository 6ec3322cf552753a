"""Write tensors into files of limited size with an index, each tensor at its place in its file."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maxpipe.hf.safetensors import INDEX, write_file
from maxpipe.hf.tensors import Rule, tensor_names


@dataclass(frozen=True)
class TensorFile:
    """One of the files of an export: its name, and the tensors in it with their shapes."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]


def plan_files(
    rules: Sequence[Rule], num_layers: int, itemsize: int, file_bytes: int
) -> list[TensorFile]:
    """Distribute tensors over files of at most `file_bytes`, layers one after another."""
    shapes = tensor_names(rules, num_layers)
    files: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name in sorted(shapes, key=_model_order):
        own = math.prod(shapes[name]) * itemsize
        if files[-1] and size + own > file_bytes:
            files.append({})
            size = 0
        files[-1][name] = shapes[name]
        size += own
    if len(files) == 1:
        return [TensorFile("model.safetensors", files[0])]
    total = len(files)
    return [
        TensorFile(f"model-{i:05d}-of-{total:05d}.safetensors", tensors)
        for i, tensors in enumerate(files, start=1)
    ]


def _model_order(name: str) -> tuple[int, int, str]:
    """Return a key that sorts the embedding first, then layers by number, then the head."""
    parts = name.split(".")
    if parts[1] == "layers":
        return 1, int(parts[2]), name
    return (0 if parts[1] == "embed_tokens" else 2), 0, name


def write_weights(
    target: Path,
    files: Sequence[TensorFile],
    rules: Sequence[Rule],
    dtype: np.dtype,
    read: Callable[[Rule], np.ndarray],
) -> None:
    """Write the tensors of all files, one parameter in memory at a time.

    Args:
      target: a directory.
      files: from `plan_files`.
      rules: of all parameters.
      dtype: of the tensors.
      read: returns a parameter, [num_layers, ...] if it is of layers.
    """
    data = {file.name: _create(target, file, dtype) for file in files}
    places = {n: place for f in files for n, place in _places(data[f.name], f, dtype)}
    for rule in rules:
        leaf = read(rule)
        for layer in range(len(leaf) if rule.is_layer else 1):
            parameter = leaf[layer] if rule.is_layer else leaf
            for name, index in rule.tensors(layer):
                part = rule.own_part(places[name])
                part[...] = rule.to_tensor(parameter[index]).astype(dtype)
    for mapped in data.values():
        mapped.flush()


def _create(target: Path, file: TensorFile, dtype: np.dtype) -> np.memmap:
    entries = [(name, dtype, shape) for name, shape in file.shapes.items()]
    return write_file(target / file.name, entries)


def _places(data: np.memmap, file: TensorFile, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the place of each tensor within the mapped bytes of its file."""
    end = 0
    for name, shape in file.shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        yield name, data[begin:end].view(dtype).reshape(shape)


def write_index(target: Path, files: Sequence[TensorFile], itemsize: int) -> None:
    """Write which tensor is in which file, if there are several."""
    if len(files) == 1:
        return
    total = sum(math.prod(shape) for file in files for shape in file.shapes.values()) * itemsize
    weight_map = {name: file.name for file in files for name in file.shapes}
    write_json(target / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file for people and programs."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
