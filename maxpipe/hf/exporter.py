"""Write a checkpoint as a Hugging Face folder: weights, config.json, tokenizer, model card; or its
parameters as one file, under maxpipe's own names.

One leaf of the checkpoint is read at a time, and each tensor is written at its place in its file,
so no more than the largest leaf is in memory.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from maxpipe.checkpoint.reader import ParameterReader
from maxpipe.checkpoint.record import PARAMS, Record
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.from_hf import FILE, SPECIAL_IDS, read_config_json
from maxpipe.config.sections import Config
from maxpipe.data.chat_template import put_chat_template
from maxpipe.data.tokenizers import CHAT_TEMPLATE, Tokenizer, main_file
from maxpipe.hf.adapters import MergedParameters, is_of_adapter
from maxpipe.hf.family import Family
from maxpipe.hf.model_card import FILE as CARD
from maxpipe.hf.model_card import model_card
from maxpipe.hf.origin import (
    EOS,
    GENERATION,
    TOKENIZER_FILES,
    is_imported,
    name_in_folder,
    read_kept,
    special_ids,
)
from maxpipe.hf.safetensors import header
from maxpipe.hf.tensors import is_selection_bias, spec_leaves, tensor_rules
from maxpipe.hf.weight_files import new_folder, plan_files, write_index, write_json, write_weights
from maxpipe.model.program import ModelProgram
from maxpipe.storage.local_files import write_atomically

_CODE = "auto_map"  # names Python files, which are not exported


def export(
    reader: ParameterReader,
    record: Record,
    config: Config,
    target: Path,
    *,
    family: Family,
    dtype: str,
    file_bytes: int,
    companions: Sequence[Path],
    origin: Path | None,
    tokenizer: Tokenizer | None,
    turn_ends: tuple[Set[int], str],
    learning_rate: str,
    version: str,
) -> list[str]:
    """Write the parameters of a checkpoint into a new folder, adapters merged into the base; return
    the names of all files.

    Args:
      reader, record: of the step, or of the last of several.
      target: the folder; it appears under this name when it is complete.
      family: model type of the export, from `choose_family`.
      dtype: dtype of the tensors, except expert selection biases, which are float32.
      file_bytes: largest size of a file, unless a single tensor is larger.
      companions, tokenizer: what the run was trained with, the tokenizer None if it is not known.
      origin: imported folder, from `maxpipe.hf.origin.origin_of`; its other files are kept.
      turn_ends: what ends a turn of the assistant in the run's conversations: ids of tokens, or,
        without these, a text, maybe empty.
      learning_rate: in words, with earlier ones.
      version: version of maxpipe that wrote the checkpoint.

    Raises:
      ConfigError: the target exists, or a file that the run keeps cannot be read.
      OSError: a file cannot be written; no part of the target is left.
      CheckpointDamaged, CheckpointUnreadable: see `maxpipe.checkpoint.reader`.
    """
    program = ModelProgram(config.model.base)
    rules = tensor_rules(family, program)
    files = plan_files(rules, config.model.stacked_layers, jnp.dtype(dtype), file_bytes)
    with new_folder(target, "--hf") as unfinished:
        parameters = MergedParameters(reader, config.model.lora)
        write_weights(unfinished, files, rules, lambda rule: parameters.read(rule.path))
        write_index(unfinished, files)
        content = config_json(family, config, origin) | {"torch_dtype": dtype, "dtype": dtype}
        ids: dict[str, Any] = {**special_ids(tokenizer)} if tokenizer else {}
        if copy_companions(unfinished, companions, origin):
            ids |= {name: content[name] for name in SPECIAL_IDS if content.get(name) is not None}
        end_ids, end_text = turn_ends
        _write_configs(unfinished, content | ids, ids, end_ids)
        card = model_card(
            config,
            record,
            steps=reader.steps,
            model_type=family.model_type,
            dtype=dtype,
            size=sum(math.prod(e.shape) for file in files for e in file.entries.values()),
            learning_rate=learning_rate,
            version=version,
            has_tokenizer=any(unfinished.glob("tokenizer*")),
            end_of_turn=end_text,
        )
        (unfinished / CARD).write_text(card, encoding="utf-8")
    return sorted(file.name for file in target.iterdir())


def export_file(reader: ParameterReader, config: Config, target: Path, dtype: str) -> int:
    """Write all parameters into one file, adapters merged into the base, and return the number of
    tensors. Any model can be written this way, and read without maxpipe or transformers.

    Layer parameters are [num_layers, ...], in model order. The file's metadata has the step, the
    steps of a mean, and the model's configuration as JSON. The file appears under its name when it
    is complete; expert selection biases are float32 in any `dtype`. Errors are those of `export`.
    """
    if target.exists():
        raise ConfigError(Problem("--safetensors", f"{target} exists; name a new file"))
    kind, prefix = jnp.dtype(dtype), f"{PARAMS}."
    leaves = {
        name.removeprefix(prefix): leaf
        for name, leaf in reader.leaves.items()
        if not is_of_adapter(name)
    }
    specs = spec_leaves(ModelProgram(config.model.base).specs)
    own = {".".join(path): spec.dtype for path, spec in specs if is_selection_bias(spec)}
    dtypes = {name: own.get(name, kind) for name in leaves}
    entries = [(name, dtypes[name], leaf.shape) for name, leaf in leaves.items()]
    model = {"step": reader.steps[-1], "model": asdict(config.model.base)}
    if len(reader.steps) > 1:
        model["mean_of_steps"] = reader.steps
    parameters = MergedParameters(reader, config.model.lora)

    def pieces() -> Iterator[bytes]:
        yield header(entries, {"maxpipe": json.dumps(model)})[0]
        for name in leaves:
            yield parameters.read(tuple(name.split("."))).astype(dtypes[name]).tobytes()

    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, pieces())
    return len(leaves)


def _write_configs(
    target: Path, content: Mapping[str, object], ids: Mapping[str, object], turn_ends: Set[int]
) -> None:
    """Write config.json, and generation_config.json unless an imported one needs no change.

    What ends a turn also ends a text there, so that other programs stop where `--chat` does.
    """
    file = target / GENERATION
    is_kept = file.exists()
    generation: dict[str, object] = {**ids}
    if is_kept and turn_ends:
        try:
            generation = {**json.loads(file.read_bytes())}
        except (TypeError, ValueError, RecursionError):
            raise ConfigError(Problem("RUN_DIR", f"its {GENERATION} is no JSON object")) from None
    content, common = {**content}, content.get(EOS)
    for values in (content, generation) if turn_ends else ():
        named = values.get(EOS)
        named = common if named is None else named
        earlier = [] if named is None else named if isinstance(named, list) else [named]
        ends = [*dict.fromkeys([*earlier, *sorted(turn_ends)])]
        values[EOS] = ends if len(ends) > 1 else ends[0]
    if generation and (turn_ends or not is_kept):
        write_json(file, generation)
    write_json(target / FILE, content)


def config_json(family: Family, config: Config, origin: Path | None) -> dict[str, Any]:
    """Return config.json, keeping the imported one's keys that are not about the shape."""
    written = family.config(config.model, config.data.sequence_length)
    if origin is None:
        return written
    kept = read_config_json(str(origin))
    longest = max(int(kept.get("max_position_embeddings") or 0), written["max_position_embeddings"])
    kept.pop("quantization_config", None)  # the export is not quantised
    kept.pop(_CODE, None)
    return {**kept, **written, "max_position_embeddings": longest}


def copy_companions(target: Path, companions: Sequence[Path], origin: Path | None) -> bool:
    """Copy the run's tokenizer; if it is the imported one, all files kept from its folder, and
    return True.

    A chat template that the run was trained with replaces others. Raises ConfigError if a file of
    the run cannot be read.
    """
    trained_with = main_file(companions)
    keeps_origin = origin is not None and (
        trained_with is None or is_imported(trained_with, origin)
    )
    if origin is not None and keeps_origin:
        for kept in (GENERATION, *TOKENIZER_FILES):
            if (origin / kept).is_file():
                (target / kept).write_bytes(_without_code(origin / kept))
    for file in companions:
        place = target / (name_in_folder(file) if file == trained_with else file.name)
        if file.name != CHAT_TEMPLATE and not place.exists():
            place.write_bytes(_without_code(file))
    if trained := next((file for file in companions if file.name == CHAT_TEMPLATE), None):
        put_chat_template(read_kept(trained).decode(), target)
    return keeps_origin


def _without_code(file: Path) -> bytes:
    """Return a kept file's content, tokenizer_config.json without the names of Python files."""
    content = read_kept(file)
    if file.name != "tokenizer_config.json":
        return content
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        return content
    if not isinstance(values, dict) or values.pop(_CODE, None) is None:
        return content
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
