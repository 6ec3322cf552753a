"""Hold all keys as one flat table: read and update them, and correct a misspelt key."""

import dataclasses
import difflib
import functools
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from maxpipe.config.maxtext import maxtext_hint, misspelt
from maxpipe.config.sections import Config
from maxpipe.config.sections.fields import Bounds

SectionT = TypeVar("SectionT")

# Our keys, and what other trainers call them.
_CALLED = {
    "optimizer.learning_rate": "lr",
    "optimizer.weight_decay": "wd",
    "optimizer.name": "optimizer",
    "optimizer.schedule": "lr_scheduler",
    "optimizer.grad_clip_norm": "clip_grad_norm max_grad_norm",
    "steps": "max_steps num_steps train_steps train_iters",
    "model.embed_dim": "hidden_size d_model",
    "model.mlp_dim": "d_ff ffn_dim intermediate_size",
    "model.num_layers": "layers num_hidden_layers",
    "model.num_query_heads": "n_heads num_heads num_attention_heads",
    "model.num_kv_heads": "num_key_value_heads",
    "model.norm_eps": "rms_norm_eps",
    "model.tie_embeddings": "tie_word_embeddings weight_tying",
    "data.sequence_length": "seq_len max_seq_len context_length block_size",
    "data.global_batch_size eval.global_batch_size": "batch_size",
    "data.source data.path": "dataset",
    "pipeline.num_microbatches": "micro_batches",
    "pipeline.remat_policy": "gradient_checkpointing remat",
    "mesh.ici.stage": "num_stages stages pipeline_parallel_size pp",
    "mesh.ici.tensor": "tensor_parallel_size tp",
    "mesh.ici.data": "dp",
    "mesh.ici.context": "cp",
    "mesh.simulated_devices": "num_devices",
    "checkpoint.every": "save_every save_interval save_steps",
    "eval.every": "eval_every",
}
SYNONYMS = {theirs: ours.split() for ours, names in _CALLED.items() for theirs in names.split()}


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


def _walk(section: Any, prefix: str, needs: str = "") -> Iterator[tuple[str, Option | type]]:
    for field in dataclasses.fields(section):
        key = prefix + field.name
        if dataclasses.is_dataclass(field.type):
            yield key, typing.cast(type, field.type)
            yield from _walk(field.type, key + ".", field.metadata.get("needs", ""))
            continue
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


def update(section: SectionT, values: Mapping[str, object]) -> SectionT:
    """Return a copy of a config with some keys changed; neither keys nor values are checked."""
    inner: dict[str, dict[str, object]] = defaultdict(dict)
    for key, value in values.items():
        name, _, rest = key.partition(".")
        inner[name][rest] = value
    fields = {
        name: changed[""] if "" in changed else update(getattr(section, name), changed)
        for name, changed in inner.items()
    }
    return dataclasses.replace(typing.cast(Any, section), **fields)


def unknown_key(key: str, is_section: bool = False) -> str:
    """Return the message for a key that does not exist, with the one that was meant, if any."""
    section, _, last = key.rpartition(".")
    while section and section not in _TABLE:
        section = section.rpartition(".")[0]
    if section in OPTIONS:
        return f"unknown key; {section} takes a value and is no section, see --help {section}"
    is_ours = is_section or (section and any(_last(name) == last for name in OPTIONS))
    if not is_ours and (theirs := maxtext_hint(last)):
        return theirs
    if near := _nearest_keys(key, is_section):
        return f"unknown key; did you mean {' or '.join(near)}?"
    if theirs := maxtext_hint(misspelt(last)):
        return f"unknown key; {theirs}"
    if section:
        names = ", ".join(field.name for field in dataclasses.fields(SECTIONS[section]))
        return f"unknown key; the keys of {section} are {names}"
    top = ", ".join(name for name in SECTIONS if "." not in name)
    return f"unknown key; the sections are {top}, and --help SECTION lists their keys"


def _nearest_keys(key: str, is_section: bool) -> list[str]:
    """Return up to three full keys that `key` may stand for, the likeliest first.

    These are keys that other trainers call so, or else with the most similar last word, those of
    the same section before others.
    """
    section, _, last = key.rpartition(".")
    if not is_section and last in SYNONYMS:
        return SYNONYMS[last]
    names = [*SECTIONS] if is_section else [*OPTIONS]
    near = difflib.get_close_matches(last, map(_last, names), n=1, cutoff=0.8)
    keys = [name for name in names if _last(name) in near]
    inside = [name for name in keys if name.rpartition(".")[0] == section]

    def unlikeness(name: str) -> float:
        return -difflib.SequenceMatcher(None, name, key).ratio()

    return inside or sorted(keys, key=unlikeness)[:3]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
