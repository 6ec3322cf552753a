"""Hold all keys as one flat table: read and update them, and correct a misspelt key."""

import dataclasses
import difflib
import functools
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from maxpipe.config.maxtext import maxtext_hint, misspelt
from maxpipe.config.sections import Config
from maxpipe.config.sections.fields import Bounds

_CUTOFF = 0.6  # least similarity at which a key is proposed
_PART = 0.7  # least similarity at which parts of two keys count as the same
_NUM = "num_"
_SHORTEST_TYPO = 4  # fewest letters of a word in which one may be wrong

# What other trainers call our keys.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "lr": ("optimizer.learning_rate",),
    "wd": ("optimizer.weight_decay",),
    "optimizer": ("optimizer.name",),
    "lr_scheduler": ("optimizer.schedule",),
    "warmup": ("optimizer.warmup_steps",),
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
    "n_layers": ("model.num_layers",),
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
    "dataset": ("data.source", "data.path"),
    "micro_batches": ("pipeline.num_microbatches",),
    "microbatches": ("pipeline.num_microbatches",),
    "num_stages": ("mesh.ici.stage",),
    "stages": ("mesh.ici.stage",),
    "pipeline_parallel_size": ("mesh.ici.stage",),
    "tensor_parallel_size": ("mesh.ici.tensor",),
    "pp": ("mesh.ici.stage",),
    "tp": ("mesh.ici.tensor",),
    "dp": ("mesh.ici.data",),
    "cp": ("mesh.ici.context",),
    "num_devices": ("mesh.simulated_devices",),
    "devices": ("mesh.simulated_devices",),
    "gradient_checkpointing": ("pipeline.remat_policy",),
    "remat": ("pipeline.remat_policy",),
    "save_every": ("checkpoint.every",),
    "save_interval": ("checkpoint.every",),
    "save_steps": ("checkpoint.every",),
    "eval_every": ("eval.every",),
}

# Keys that users may look for, and how to do without them.
_ABSENT: Mapping[str, str] = {
    "devices_per_stage": "all stages of a run have equally many devices, because one mesh holds "
    "the batch, the parameters and the checkpoints of all; balance stages by their layers instead "
    "(pipeline.layers_per_stage=auto), or run your own training function on stages of different "
    "sizes with maxpipe.pipeline.mpmd (examples/own_model_mpmd.py --devices-per-stage 2 1 1)",
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
    """Return the message for a key that does not exist.

    It says how to do without a key that users may look for, or that a key is written below one that
    is not a section. Otherwise it proposes a key of the same section that differs in a letter, our
    name for a key of MaxText or another trainer, a similar key, or all keys of the section.
    """
    section, _, last = key.rpartition(".")
    if last in _ABSENT:
        return f"unknown key; {_ABSENT[last]}"
    home = _existing_part(section)
    if home in OPTIONS:
        kind = "list" if isinstance(OPTIONS[home].default, list) else "value"
        return f"unknown key; {home} takes a {kind} and is no section, see --help {home}"
    if home and (near := _near(last, _names_in(home, is_section))):
        return _did_you_mean(near)
    is_a_last_word = any(_last(name) == last for name in OPTIONS)
    may_be_theirs = not is_section and not (section and is_a_last_word)
    if may_be_theirs and (theirs := maxtext_hint(last)):
        return theirs
    if near := nearest_keys(key, is_section):
        return _did_you_mean(near)
    if theirs := maxtext_hint(misspelt(last)):
        return f"unknown key; {theirs}"
    if home:
        names = ", ".join(field.name for field in dataclasses.fields(SECTIONS[home]))
        return f"unknown key; the keys of {home} are {names}"
    top = ", ".join(name for name in SECTIONS if "." not in name)
    return f"unknown key; the sections are {top}, and --help SECTION lists their keys"


def nearest_keys(key: str, is_section: bool = False) -> list[str]:
    """Return up to three full keys that `key` may stand for, the likeliest first.

    First come keys of the given section, or of the part of it that exists, that differ in a letter;
    then keys of any section that end in the same word; then our names for keys of other trainers;
    then keys of the given section with a similar spelling; then keys of any section that differ in
    a letter. Without a section, keys of all sections count as given.
    """
    names = list(SECTIONS if is_section else OPTIONS)
    section, _, last = key.rpartition(".")
    home = _existing_part(section)
    inside = _names_in(home, is_section) if home else names
    if home and (near := _near(last, inside)):
        return near[:3]
    if same := [name for name in names if _last(name) == last]:
        return sorted(same, key=lambda name: -_likeness(name.rpartition(".")[0], section))[:3]
    if not is_section and last in SYNONYMS:
        return [*SYNONYMS[last]]
    return (_near(last, inside) or _alike(last, inside) or _near(last, names))[:3]


def _existing_part(section: str) -> str:
    """Return the longest beginning of a section's name that is a key or section; "" if none is."""
    while section and section not in _TABLE:
        section = section.rpartition(".")[0]
    return section


def _names_in(section: str, is_section: bool) -> list[str]:
    """Return the full names of the keys, or of the sections, directly in a section."""
    names = SECTIONS if is_section else OPTIONS
    return [name for name in names if name.rpartition(".")[0] == section]


def _did_you_mean(names: Iterable[str]) -> str:
    return f"unknown key; did you mean {' or '.join(names)}?"


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _near(word: str, names: Iterable[str]) -> list[str]:
    """Return the names whose last word is `word` except for a letter or a `num_`."""
    pairs = {name: _comparable(_last(name), word) for name in names}
    equal = [name for name, (last, own) in pairs.items() if last == own]
    return equal or [name for name, pair in pairs.items() if _is_typo(*pair)]


def _comparable(a: str, b: str) -> tuple[str, str]:
    """Return two words to compare; if one begins with `num_`, the plurals of what both count."""
    if not (a.startswith(_NUM) or b.startswith(_NUM)):
        return a, b
    counted, other = (word.removeprefix(_NUM).removesuffix("s") + "s" for word in (a, b))
    return counted, other


def _is_typo(a: str, b: str) -> bool:
    """Return whether a letter added, dropped or changed, or two swapped, turn one into the other.

    Words of fewer than four letters are too short to tell.
    """
    if min(len(a), len(b)) < _SHORTEST_TYPO:
        return False
    pairs = enumerate(zip(a, b, strict=False))
    start = next((i for i, (left, right) in pairs if left != right), min(len(a), len(b)))
    a, b = a[start:], b[start:]
    is_swapped = a[:2] == b[:2][::-1] and a[2:] == b[2:]
    return is_swapped or a[1:] == b[1:] or a[1:] == b or a == b[1:]


def _alike(word: str, names: Iterable[str]) -> list[str]:
    """Return the names whose last words contain `word`, or else are spelt most like it.

    If different last words contain it, as embed_dim and mlp_dim contain `dim`, return none, since
    each is as likely as the others.
    """
    lasts = {name: _last(name) for name in names}
    holding = [name for name, last in lasts.items() if f"_{word}_" in f"_{last}_"]
    if holding:
        return holding if len({lasts[name] for name in holding}) == 1 else []
    scores = {name: _spelling(last, word) for name, last in lasts.items()}
    best = max(_CUTOFF, *scores.values(), 0.0)
    near = [name for name in scores if scores[name] >= best - 1e-9]
    return [name for name in near if "." not in name] or near


def _spelling(a: str, b: str) -> float:
    """Return how similar two words are; 0 unless each part of one is like a part of the other.

    Underscores separate parts. So `num_repeats` is like `num_repeat`, but not like `num_experts`;
    `batch_size` is like `global_batch_size`, which has all of its parts.
    """
    parts, others = a.split("_"), b.split("_")
    likenesses = [max(_likeness(part, other) for other in others) for part in parts]
    likenesses += [max(_likeness(part, other) for part in parts) for other in others]
    has_all_parts = {*parts} <= {*others} or {*others} <= {*parts}
    differs_in_underscores = a.replace("_", "") == b.replace("_", "")
    if has_all_parts or differs_in_underscores or min(likenesses) >= _PART:
        return _likeness(a, b)
    return 0.0


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
