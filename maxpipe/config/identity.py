"""Tell runs apart: keys that decide what saved state means, and how two configurations differ.

A key in `GROUPS` keeps its value for the whole run, unless `checkpoint.accept_changes` names its
group; the size of the batch also needs a ramp. All other keys may change from one start to the
next.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maxpipe.config.errors import Problem
from maxpipe.config.options import OPTIONS, get
from maxpipe.config.sections import Config

ACCEPT = "checkpoint.accept_changes"


def _in(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


# What these name is compared by content where the checkpoint has a fingerprint of it.
FINGERPRINTED = _in("data", "source path eval_path mixture tokenizer chat_template")
GROUPS: Mapping[str, tuple[str, ...]] = {
    "model": ("model",),
    "seed": ("seed",),
    "optimizer": ("optimizer.name",),
    "data": (
        *FINGERPRINTED[:4],
        *_in("data", "mixture_by mixture_changes stream column shuffle eval_fraction packing"),
        *_in("data", "sequence_length batch_ramp global_batch_size"),
    ),
    "tokenizer": FINGERPRINTED[4:],
}
# A checkpoint has a data position for each sequence of a batch: it may only grow, as a ramp says.
_BATCH = "data.global_batch_size"
# How layers are computed and spread; the state does not depend on it.
_OF_A_COMPUTATION = _in(
    "model",
    "attention attention_block_size rotation gating logit_tiles moe.kernel moe.dispatch",
)
# May also change with checkpoint.convert_dtype.
_DTYPES = ("model.dtype", "model.param_dtype")
# Another value gives the model other arrays, unless the model does not use the key.
SHAPED = _in(
    "model",
    "block num_layers first_dense_layers embed_dim num_query_heads num_kv_heads head_dim mlp_dim "
    "vocab_size tie_embeddings mlp_bias attention_kind qk_norm qk_norm_scope attention_bias "
    "attention_output_bias attention_sinks norm_placement mla.q_lora_rank mla.kv_lora_rank "
    "mla.qk_nope_head_dim mla.qk_rope_head_dim mla.v_head_dim moe.experts moe.mlp_dim "
    "moe.shared_experts moe.logit_bias lora.rank lora.targets",
)
# Keys about a single start, and about the place of the run; the keys of a shape are compared.
_OF_A_START = {
    *("run_name", "output_dir", "stop_after", "base_model", "init_from", "model.from_hf"),
    *("checkpoint.resume", "checkpoint.convert_dtype", ACCEPT),
}
# Rows of padding are never predicted, so token ids must not become padding.
_TOKEN_IDS = "model.unpadded_vocab_size"
_ROWS = "model.vocab_size"
_OTHER_SHAPES = "; no run continues from arrays of other shapes"
# Keys of `model.*` that say how a model is computed or trained; the others are its shape.
_NOT_SHAPE = (
    *_OF_A_COMPUTATION,
    *_DTYPES,
    *_in(
        "model",
        "from_hf block dropout z_loss quantisation quantised_passes rope_scaling.length lora "
        "moe.balance_loss moe.bias_rate moe.capacity_factor moe.z_loss",
    ),
)


def _is_of(key: str, names: Sequence[str]) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in names)


SHAPE_DEFAULTS: Mapping[str, object] = {
    key.removeprefix("model."): option.default
    for key, option in OPTIONS.items()
    if key.startswith("model.") and not _is_of(key, _NOT_SHAPE)
}


class Change(NamedTuple):
    """A key, or a package, that was changed; `before` is None if `now` says what differs."""

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
    if key in _DTYPES and config.checkpoint.convert_dtype:
        return True
    if key == _BATCH and not config.data.batch_ramp:
        return False
    group = group_of(key)
    return not group or group in config.checkpoint.accept_changes


def group_of(key: str) -> str:
    """Return the group of `GROUPS` that a key belongs to, "" if there is none."""
    if key in _OF_A_COMPUTATION:
        return ""
    return next((name for name, keys in GROUPS.items() if _is_of(key, keys)), "")


def refusals(config: Config, changed: Sequence[Change], place: str) -> list[Problem]:
    """Return a problem for each change that `config` does not allow."""
    return [_refusal(change, place) for change in changed if not is_allowed(config, change.key)]


def may_grow(change: Change) -> bool:
    """Return whether a change is a batch to which the run can grow."""
    return change.key == _BATCH and change.now % change.before == 0


def shape_refusals(changed: Sequence[Change], place: str) -> list[Problem]:
    """Return a problem for each change, accepted or not, that gives a model other arrays."""
    return [_refusal(change, place) for change in changed if change.key in SHAPED]


def _refusal(change: Change, place: str) -> Problem:
    key, before, now = change
    accept = "checkpoint.convert_dtype=true" if key in _DTYPES else f"{ACCEPT}=[{group_of(key)}]"
    remedy = _OTHER_SHAPES if key in SHAPED else f"; {accept} continues with the change"
    if key == _BATCH:
        ramp = f"data.batch_ramp=[[0, {before}], [STEP, {now}]]"
        remedy = "" if now % before else f"; with {ramp} and {accept} it grows after STEP"
    differs = f"is {now!r}, but the checkpoints in {place} were made with {before!r}"
    return Problem(key, differs + remedy)


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
