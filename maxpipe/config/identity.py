"""Tell runs apart: keys that decide what saved state means, and how two configurations differ.

A key in `GROUPS` keeps its value for the whole run, unless `checkpoint.accept_changes` names its
group. A key in `FIXED` never changes. All other keys may change from one start to the next.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maxpipe.config.errors import Problem
from maxpipe.config.options import OPTIONS, get
from maxpipe.config.sections import Config

ACCEPT = "checkpoint.accept_changes"
GROUPS: Mapping[str, tuple[str, ...]] = {
    "model": ("model",),
    "seed": ("seed",),
    "optimizer": ("optimizer.name",),
    "data": (
        "data.source",
        "data.path",
        "data.eval_path",
        "data.mixture",
        "data.column",
        "data.shuffle",
        "data.eval_fraction",
        "data.packing",
        "data.sequence_length",
    ),
    "tokenizer": ("data.tokenizer", "data.chat_template"),
}
# A checkpoint has a data position for each sequence of a batch.
FIXED = ("data.global_batch_size",)
# How layers are computed and spread; the state does not depend on it.
_OF_A_COMPUTATION = (
    "model.attention",
    "model.attention_block_size",
    "model.rotation",
    "model.gating",
    "model.logit_tiles",
    "model.moe.kernel",
    "model.moe.dispatch",
)
# May also change with checkpoint.convert_dtype.
DTYPES = ("model.dtype", "model.param_dtype")
# Another value gives the model other arrays, unless the model does not use the key.
SHAPED = (
    "model.block",
    "model.num_layers",
    "model.first_dense_layers",
    "model.embed_dim",
    "model.num_query_heads",
    "model.num_kv_heads",
    "model.head_dim",
    "model.mlp_dim",
    "model.vocab_size",
    "model.tie_embeddings",
    "model.mlp_bias",
    "model.attention_kind",
    "model.qk_norm",
    "model.qk_norm_scope",
    "model.attention_bias",
    "model.attention_output_bias",
    "model.attention_sinks",
    "model.norm_placement",
    "model.mla.q_lora_rank",
    "model.mla.kv_lora_rank",
    "model.mla.qk_nope_head_dim",
    "model.mla.qk_rope_head_dim",
    "model.mla.v_head_dim",
    "model.moe.experts",
    "model.moe.mlp_dim",
    "model.moe.shared_experts",
    "model.moe.logit_bias",
    "model.lora.rank",
    "model.lora.targets",
)
# What these name is compared by content where the checkpoint has a fingerprint of it.
FINGERPRINTED = (
    "data.source",
    "data.path",
    "data.eval_path",
    "data.mixture",
    "data.tokenizer",
    "data.chat_template",
)
# Keys about a single start, and about the place of the run.
_OF_A_START = {
    "run_name",
    "output_dir",
    "stop_after",
    "base_model",
    "init_from",
    "model.from_hf",  # the keys of the shape are compared themselves
    "checkpoint.resume",
    "checkpoint.convert_dtype",
    ACCEPT,
}
# Rows of padding are never predicted, so token ids must not become padding.
_TOKEN_IDS = "model.unpadded_vocab_size"
_ROWS = "model.vocab_size"
_OTHER_SHAPES = "; no run continues from arrays of other shapes"


def _is_of(key: str, names: Sequence[str]) -> bool:
    """Return whether a key, or a section that it is in, is among the names."""
    return any(f"{key}.".startswith(f"{name}.") for name in names)


# Keys of `model.*` that say how a model is computed or trained; the others are its shape.
_NOT_SHAPE = (
    *_OF_A_COMPUTATION,
    *DTYPES,
    "model.from_hf",
    "model.block",
    "model.dropout",
    "model.z_loss",
    "model.moe.balance_loss",
    "model.moe.bias_rate",
    "model.moe.capacity_factor",
    "model.moe.z_loss",
    "model.quantisation",
    "model.quantised_passes",
    "model.rope_scaling.length",
    "model.lora",
)
SHAPE_DEFAULTS: Mapping[str, object] = {
    key.removeprefix("model."): option.default
    for key, option in OPTIONS.items()
    if key.startswith("model.") and not _is_of(key, _NOT_SHAPE)
}


class Change(NamedTuple):
    """A key, or another named part of a run, that was changed.

    Attributes:
      key: full key, or the name of a package.
      before: value in the checkpoint; None if `now` describes the difference.
      now: value of this start.
    """

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.key}, {self.now}"
        return f"{self.key} {_shown(self.before)} -> {_shown(self.now)}"


def differing_keys(a: Config, b: Config) -> list[str]:
    """Return the keys whose values differ between two configurations."""
    return [key for key in OPTIONS if get(a, key) != get(b, key)]


def changes(config: Config, saved: Mapping[str, Any]) -> list[Change]:
    """Return every key whose value differs from that of a saved configuration.

    A key that `saved` lacks, because an earlier version wrote it, counts as having had its default.
    Keys about a single start, such as `stop_after`, are left out. `saved` is nested mappings.
    """
    differing = []
    for key, option in OPTIONS.items():
        if key in _OF_A_START:
            continue
        now = get(config, key)
        before = lookup(saved, key, None if option.bounds.derived else option.default)
        if key == _TOKEN_IDS:  # -1: no row is padding
            before = lookup(saved, _ROWS, None) if before in (None, -1) else before
            now = get(config, _ROWS) if now == -1 else now
        if before is not None and now != before:
            differing.append(Change(key, before, now))
    return differing


def is_allowed(config: Config, key: str) -> bool:
    """Return whether `config` lets a key, or a fingerprint named after it, change on resume."""
    if key in DTYPES and config.checkpoint.convert_dtype:
        return True
    group = group_of(key)
    return key not in FIXED and (not group or group in config.checkpoint.accept_changes)


def group_of(key: str) -> str:
    """Return the group of `GROUPS` that a key belongs to, "" if there is none."""
    if key in _OF_A_COMPUTATION:
        return ""
    return next((name for name, keys in GROUPS.items() if _is_of(key, keys)), "")


def refusals(config: Config, changed: Sequence[Change], place: str) -> list[Problem]:
    """Return a problem for each change that `config` does not allow."""
    return [
        Problem(change.key, _differs(change, place) + _remedy(change.key))
        for change in changed
        if not is_allowed(config, change.key)
    ]


def shape_refusals(changed: Sequence[Change], place: str) -> list[Problem]:
    """Return a problem for each change, accepted or not, that gives a model other arrays."""
    return [
        Problem(change.key, _differs(change, place) + _OTHER_SHAPES)
        for change in changed
        if change.key in SHAPED
    ]


def _differs(change: Change, place: str) -> str:
    return f"is {change.now!r}, but the checkpoints in {place} were made with {change.before!r}"


def _remedy(key: str) -> str:
    if key in FIXED:
        return ""
    if key in SHAPED:
        return _OTHER_SHAPES
    accept = "checkpoint.convert_dtype=true" if key in DTYPES else f"{ACCEPT}=[{group_of(key)}]"
    return f"; {accept} continues with the change"


def _shown(value: object) -> str:
    return value if isinstance(value, str) and value else repr(value)


def lookup(tree: Mapping[str, Any], key: str, default: Any) -> Any:
    """Return a value of nested mappings by its full key, or else the default."""
    value: Any = tree
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value
