"""Write tensors into files of limited size with an index, each tensor at its place in its file."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.hf.safetensors import INDEX, WEIGHTS, write_file
from maxpipe.hf.tensors import Rule, rules_by_tensor


class Entry(NamedTuple):
    """Dtype and shape of a tensor in a file."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorFile:
    """One of the files of an export: its name, and the tensors in it by name."""

    name: str
    entries: Mapping[str, Entry]


@contextmanager
def new_folder(target: Path, flag: str) -> Iterator[Path]:
    """Yield a folder to write into, which has the name `target` when it is complete.

    Raises ConfigError, naming the flag, if the target exists. After an error nothing is left.
    """
    if target.exists():
        raise ConfigError(Problem(flag, f"{target} exists; name a new directory"))
    unfinished = target.with_name(f".{target.name}.unfinished-{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def plan_files(
    rules: Sequence[Rule], num_layers: int, dtype: np.dtype, file_bytes: int
) -> list[TensorFile]:
    """Distribute tensors over files of at most `file_bytes`, unless a single tensor is larger.

    `num_layers` counts stacked layers; `dtype` is that of tensors whose rules name no other.
    """
    entries = {
        name: Entry(rule.dtype or dtype, rule.tensor_shape)
        for name, rule in rules_by_tensor(rules, num_layers).items()
    }
    files: list[dict[str, Entry]] = [{}]
    size = 0
    for name in sorted(entries, key=_model_order):
        own = entries[name].num_bytes
        if files[-1] and size + own > file_bytes:
            files.append({})
            size = 0
        files[-1][name] = entries[name]
        size += own
    if len(files) == 1:
        return [TensorFile(WEIGHTS, files[0])]
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
    read: Callable[[Rule], np.ndarray],
) -> None:
    """Write the tensors of all files into a directory, one parameter in memory at a time.

    `read` returns the parameter of a rule, [num_layers, ...] for layer parameters.
    """
    data: list[np.memmap] = []
    places: dict[str, np.ndarray] = {}  # of each tensor within the mapped bytes of its file
    for file in files:
        entries = [(name, entry.dtype, entry.shape) for name, entry in file.entries.items()]
        data.append(mapped := write_file(target / file.name, entries))
        end = 0
        for name, entry in file.entries.items():
            begin, end = end, end + entry.num_bytes
            places[name] = mapped[begin:end].view(entry.dtype).reshape(entry.shape)
    for rule in rules:
        leaf = read(rule)
        for layer in range(len(leaf) if rule.is_layer else 1):
            parameter = leaf[layer] if rule.is_layer else leaf
            for name, index in rule.tensors(layer):
                part = rule.own_part(places[name])
                part[...] = rule.to_tensor(parameter[index]).astype(part.dtype)
    for mapped in data:
        mapped.flush()


def write_index(target: Path, files: Sequence[TensorFile]) -> None:
    """Write which tensor is in which file, if there are several."""
    if len(files) == 1:
        return
    total = sum(entry.num_bytes for file in files for entry in file.entries.values())
    weight_map = {name: file.name for file in files for name in file.entries}
    write_json(target / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file for people and programs."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
