"""Write a checkpoint as a folder of Hugging Face: weights, config.json, tokenizer.

A leaf of the checkpoint is read at a time, and each tensor is written at its place in its file, so
no more than the largest leaf is in memory.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from maxpipe.checkpoint.reader import PARAMS, read_arrays
from maxpipe.checkpoint.record import Record
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.from_hf import FILE, read_config_json
from maxpipe.config.sections import Config
from maxpipe.hf.family import Family
from maxpipe.hf.tensors import Rule, tensor_rules
from maxpipe.hf.weight_files import plan_files, write_index, write_json, write_weights
from maxpipe.model.program import ModelProgram

# What a model's folder has besides config.json and weights
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def export(
    directory: Path,
    record: Record,
    config: Config,
    target: Path,
    *,
    family: Family,
    dtype: str,
    file_bytes: int,
    companions: Sequence[Path],
    origin: Path | None,
) -> list[str]:
    """Write the parameters of a checkpoint into a new folder.

    Args:
      directory, record: of a committed step.
      config: of the run, resolved.
      target: the folder; it appears under this name when it is complete.
      family: from `model_types.choose_family`.
      dtype: of the tensors.
      file_bytes: largest size of a file, if no tensor is larger.
      companions: files of the tokenizer, unless `origin` has some.
      origin: folder that the run was imported from; its other files are kept.

    Returns:
      Names of all files.

    Raises:
      ConfigError: the target exists.
      CheckpointDamaged, CheckpointUnreadable: see `maxpipe.checkpoint.reader`.
    """
    if target.exists():
        raise ConfigError(Problem("--hf", f"{target} exists; name a new directory"))
    program = ModelProgram(config.model)
    rules = tensor_rules(family, program)
    kind = jnp.dtype(dtype)
    files = plan_files(rules, config.model.num_layers, kind.itemsize, file_bytes)
    unfinished = target.with_name(f".{target.name}.unfinished-{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        write_weights(unfinished, files, rules, kind, _leaf_reader(directory, record))
        write_index(unfinished, files, kind.itemsize)
        content = config_json(family, config, origin) | {"torch_dtype": dtype, "dtype": dtype}
        write_json(unfinished / FILE, content)
        _copy_companions(unfinished, companions, origin)
        names = sorted(file.name for file in unfinished.iterdir())
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return names


def config_json(family: Family, config: Config, origin: Path | None) -> dict[str, Any]:
    """Return config.json; keys of the imported one that are not about the shape are kept."""
    written = family.config(config.model, config.data.sequence_length)
    if origin is None:
        return written
    kept = read_config_json(str(origin))
    longest = max(int(kept.get("max_position_embeddings", 0)), written["max_position_embeddings"])
    return {**kept, **written, "max_position_embeddings": longest}


def _leaf_reader(directory: Path, record: Record) -> Callable[[Rule], np.ndarray]:
    def read(rule: Rule) -> np.ndarray:
        name = ".".join((PARAMS, *rule.path))
        return np.asarray(read_arrays(directory, record.leaves, {name: None})[name])

    return read


def _copy_companions(target: Path, companions: Sequence[Path], origin: Path | None) -> None:
    kept = [origin / name for name in _COMPANIONS if (origin / name).is_file()] if origin else []
    has_tokenizer = any(file.name.startswith("tokenizer") for file in kept)
    for file in [*([] if has_tokenizer else companions), *kept]:
        shutil.copyfile(file, target / file.name)
