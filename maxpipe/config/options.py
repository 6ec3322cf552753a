"""Hold all keys as one flat table: read and update them, and correct a misspelt key."""

import dataclasses
import difflib
import functools
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from maxpipe.config.maxtext import maxtext_hint, misspelt
from maxpipe.config.sections import Config
from maxpipe.config.sections.fields import Bounds

# What other trainers call our keys.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "lr": ("optimizer.learning_rate",),
    "wd": ("optimizer.weight_decay",),
    "optimizer": ("optimizer.name",),
    "lr_scheduler": ("optimizer.schedule",),
    "clip_grad_norm": ("optimizer.grad_clip_norm",),
    "max_grad_norm": ("optimizer.grad_clip_norm",),
    "max_steps": ("steps",),
    "num_steps": ("steps",),
    "train_steps": ("steps",),
    "train_iters": ("steps",),
    "hidden_size": ("model.embed_dim",),
    "d_model": ("model.embed_dim",),
    "d_ff": ("model.mlp_dim",),
    "ffn_dim": ("model.mlp_dim",),
    "intermediate_size": ("model.mlp_dim",),
    "layers": ("model.num_layers",),
    "num_hidden_layers": ("model.num_layers",),
    "n_heads": ("model.num_query_heads",),
    "num_heads": ("model.num_query_heads",),
    "num_attention_heads": ("model.num_query_heads",),
    "num_key_value_heads": ("model.num_kv_heads",),
    "rms_norm_eps": ("model.norm_eps",),
    "tie_word_embeddings": ("model.tie_embeddings",),
    "weight_tying": ("model.tie_embeddings",),
    "seq_len": ("data.sequence_length",),
    "max_seq_len": ("data.sequence_length",),
    "context_length": ("data.sequence_length",),
    "block_size": ("data.sequence_length",),
    "batch_size": ("data.global_batch_size", "eval.global_batch_size"),
    "dataset": ("data.source", "data.path"),
    "micro_batches": ("pipeline.num_microbatches",),
    "num_stages": ("mesh.ici.stage",),
    "stages": ("mesh.ici.stage",),
    "pipeline_parallel_size": ("mesh.ici.stage",),
    "tensor_parallel_size": ("mesh.ici.tensor",),
    "pp": ("mesh.ici.stage",),
    "tp": ("mesh.ici.tensor",),
    "dp": ("mesh.ici.data",),
    "cp": ("mesh.ici.context",),
    "num_devices": ("mesh.simulated_devices",),
    "gradient_checkpointing": ("pipeline.remat_policy",),
    "remat": ("pipeline.remat_policy",),
    "save_every": ("checkpoint.every",),
    "save_interval": ("checkpoint.every",),
    "save_steps": ("checkpoint.every",),
    "eval_every": ("eval.every",),
}


@dataclass(frozen=True)
class Option:
    """A key of the configuration: its full name, the type and default of its field, its bounds."""

    key: str
    type: object
    default: object
    bounds: Bounds

    @property
    def choices(self) -> list[str]:
        """Return the closed list of legal values; empty if there is none."""
        if self.bounds.variants is not None:
            return [*self.bounds.also, *self.bounds.variants]
        return [str(choice) for choice in self.bounds.choices or ()]


def _walk(section: type, prefix: str, needs: str = "") -> Iterator[tuple[str, Option | type]]:
    for field in dataclasses.fields(section):
        key = prefix + field.name
        if dataclasses.is_dataclass(field.type):
            yield key, typing.cast(type, field.type)
            yield from _walk(
                typing.cast(type, field.type), key + ".", field.metadata.get("needs", "")
            )
        else:
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            bounds = field.metadata["bounds"]
            if needs and not bounds.needs and needs != key:
                bounds = dataclasses.replace(bounds, needs=needs)
            yield key, Option(key, field.type, default, bounds)


_TABLE = dict(_walk(Config, ""))
OPTIONS: Mapping[str, Option] = {
    key: entry for key, entry in _TABLE.items() if isinstance(entry, Option)
}
SECTIONS: Mapping[str, type] = {
    key: entry for key, entry in _TABLE.items() if isinstance(entry, type)
}


def get(config: Config, key: str) -> Any:
    """Return the value of a key or section, such as `get(config, "mesh.ici.stage")`."""
    return functools.reduce(getattr, key.split("."), config)


def is_set(config: Config, key: str) -> bool:
    """Return whether a key has another value than its default."""
    return get(config, key) != OPTIONS[key].default


def update(config: Config, values: Mapping[str, object]) -> Config:
    """Return a copy with some keys changed; neither keys nor values are checked."""
    return _update(config, {tuple(key.split(".")): value for key, value in values.items()})


def unknown_key(key: str, is_section: bool = False) -> str:
    """Return the message for a key that does not exist, with the one that was meant, if any."""
    section, _, last = key.rpartition(".")
    while section and section not in _TABLE:
        section = section.rpartition(".")[0]
    if section in OPTIONS:
        kind = "list" if isinstance(OPTIONS[section].default, list) else "value"
        return f"unknown key; {section} takes a {kind} and is no section, see --help {section}"
    is_ours = is_section or (section and any(_last(name) == last for name in OPTIONS))
    if not is_ours and (theirs := maxtext_hint(last)):
        return theirs
    if near := nearest_keys(key, is_section):
        return f"unknown key; did you mean {' or '.join(near)}?"
    if theirs := maxtext_hint(misspelt(last)):
        return f"unknown key; {theirs}"
    if section:
        names = ", ".join(field.name for field in dataclasses.fields(SECTIONS[section]))
        return f"unknown key; the keys of {section} are {names}"
    top = ", ".join(name for name in SECTIONS if "." not in name)
    return f"unknown key; the sections are {top}, and --help SECTION lists their keys"


def nearest_keys(key: str, is_section: bool = False) -> list[str]:
    """Return up to three full keys that `key` may stand for, the likeliest first.

    These are keys that end in the same word or that other trainers call so, or else with the most
    similar last word, in the same section or in any.
    """
    names = [*SECTIONS] if is_section else [*OPTIONS]
    section, _, last = key.rpartition(".")
    if not is_section and last in SYNONYMS:
        return [*SYNONYMS[last]]
    inside = [name for name in names if name.rpartition(".")[0] == section]
    for some, cutoff in ((names, 1.0), (inside, 0.75), (names, 0.85)):
        if near := difflib.get_close_matches(last, map(_last, some), n=1, cutoff=cutoff):
            keys = [name for name in some if _last(name) in near]
            return sorted(keys, key=lambda name: -_likeness(name.rpartition(".")[0], section))[:3]
    return []


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _update(section: Any, values: Mapping[tuple[str, ...], object]) -> Any:
    fields: dict[str, object] = {path[0]: value for path, value in values.items() if len(path) == 1}
    for name in {path[0] for path in values if len(path) > 1}:
        inner = {
            path[1:]: value for path, value in values.items() if path[0] == name and len(path) > 1
        }
        fields[name] = _update(getattr(section, name), inner)
    return dataclasses.replace(section, **fields)
