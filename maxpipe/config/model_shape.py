"""Say which keys of `model.*` are the shape of a model: what it is, not how it is computed."""

from collections.abc import Mapping

from maxpipe.config.options import OPTIONS

# Keys of `model.*` that say how a model is computed or trained, not what it is.
_NOT_SHAPE = (
    "from_hf",
    "block",
    "dtype",
    "param_dtype",
    "dropout",
    "z_loss",
    "logit_tiles",
    "moe.balance_loss",
    "moe.bias_rate",
    "moe.capacity_factor",
    "moe.z_loss",
    "moe.kernel",
    "moe.dispatch",
    "attention",
    "attention_block_size",
    "quantisation",
    "quantised_passes",
    "rotation",
    "gating",
    "rope_scaling.length",
    "lora.rank",
    "lora.alpha",
    "lora.targets",
    "lora.dropout",
)
SHAPE_DEFAULTS: Mapping[str, object] = {
    key.removeprefix("model."): option.default
    for key, option in OPTIONS.items()
    if key.startswith("model.") and key.removeprefix("model.") not in _NOT_SHAPE
}
