"""Translate the model: its shape, the switches of its block, its rotary embeddings."""

import math

from maxpipe.migration.blocks import (
    BLOCKS,
    missing_block,
    translate_attention,
    translate_experts,
    translate_norms,
    translate_switches,
)
from maxpipe.migration.translator import Translator

KERNELS = {"autoselected": "auto", "dot_product": "dot_product", "flash": "splash"}
# MaxText's pair of activations, the gate's first -> ours. Its gelu is jax.nn.gelu, the tanh one.
ACTIVATIONS = {("silu", "linear"): "silu", ("gelu", "linear"): "gelu_tanh"}


def translate_model(t: Translator) -> None:
    """Set the model's shape and the switches of its block."""
    name = t.text("decoder_block")
    if name not in BLOCKS:
        t.refuse("decoder_block", missing_block(name))
        return
    block = BLOCKS[name]
    if t.text("load_parameters_path") and not block.is_dense_llama:
        able = ", ".join(other for other, facts in BLOCKS.items() if facts.is_dense_llama)
        message = (
            f"weights of decoder_block={name} are not read, those of {able} are; "
            "init_from=hf:DIR reads a Hugging Face model's"
        )
        t.refuse("load_parameters_path", message)
    doublings = _doublings(t)
    for key, ours, times in zip(*_sizes(), doublings, strict=True):
        layers = block.num_layers if ours == "num_layers" else 1
        t.set(f"model.{ours}", 2**times * t.integer(key) * layers, key)
    t.copy(
        "head_dim",
        "vocab_size",
        "dtype",
        "weight_dtype",
        "logits_via_embedding",
        "z_loss_multiplier",
        "num_vocab_tiling",
        "normalization_layer_epsilon",
        "rope_max_timescale",
    )
    dropout = t.number("dropout_rate") if t.is_on("enable_dropout") else 0
    t.set("model.dropout", dropout, "dropout_rate", "enable_dropout")
    if dropout:
        t.note("dropout_rate", "the masks lie on the outputs of attention and MLP")
    translate_switches(t, name, block)
    translate_norms(t, block)
    translate_attention(t, name, block)
    translate_experts(t, name, block, 2 ** doublings[3])
    _translate_activation(t)
    _translate_logits(t, 2 ** doublings[0] * t.integer("base_emb_dim"))
    attention = t.text("attention")
    t.set("model.attention", KERNELS.get(attention, "auto"), "attention")
    if attention not in KERNELS or (attention == "flash" and t.text("hardware") != "tpu"):
        t.set("model.attention", "auto", "attention")
        t.note("attention", "model.attention=auto picks a kernel by backend")
    _translate_rope(t)


def _sizes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return MaxText's keys that the scale multiplies, and the names of their counterparts."""
    names = ("emb_dim", "num_query_heads", "num_kv_heads", "mlp_dim", "num_decoder_layers")
    ours = ("embed_dim", "num_query_heads", "num_kv_heads", "mlp_dim", "num_layers")
    return tuple(f"base_{name}" for name in names), ours


def _doublings(t: Translator) -> tuple[int, ...]:
    """Return how often `global_parameter_scale` doubles each of `_sizes()`."""
    scale = t.integer("global_parameter_scale", 1)
    if scale < 1 or scale.bit_count() != 1:
        t.refuse("global_parameter_scale", f"expected a power of two, got {scale}")
        return (0,) * 5
    every, left = divmod(scale.bit_length() - 1, 3)
    width, heads = every + (left > 1), every + (left > 0)
    return width, heads, heads, heads, every


def _translate_activation(t: Translator) -> None:
    """Set the activation of the MLP's gate."""
    value = t.value("mlp_activations")
    names = tuple(value) if isinstance(value, list) else (str(value),)
    if names in ACTIVATIONS:
        t.set("model.mlp_activation", ACTIVATIONS[names], "mlp_activations")
        return
    legal = " or ".join(f"[{', '.join(pair)}]" for pair in ACTIVATIONS)
    t.refuse("mlp_activations", f"[{', '.join(names)}] has no counterpart; use {legal}")


def _translate_logits(t: Translator, width: int) -> None:
    """Set scale and cap of the logits of tied embeddings; MaxText changes no others."""
    cap = t.number("final_logits_soft_cap")
    is_tied = t.is_on("logits_via_embedding")
    if t.is_on("normalize_embedding_logits") and is_tied:
        t.set("model.logit_scale", 1 / math.sqrt(width), "normalize_embedding_logits")
    if cap and not is_tied:
        message = "left out: MaxText caps the logits of tied embeddings only"
        t.note("final_logits_soft_cap", message)
    t.set("model.logit_soft_cap", cap if is_tied else 0.0, "final_logits_soft_cap")


def _translate_rope(t: Translator) -> None:
    """Set linear scaling, or Llama 3.1's, which MaxText applies to models called llama3.1*."""
    kind, factor = t.text("rope_type"), t.number("rope_linear_scaling_factor", 1)
    if t.text("model_name").startswith("llama3.1") or kind.startswith("llama3.1"):
        if factor != 1:
            t.note("rope_linear_scaling_factor", "left out: MaxText does not read it for llama3.1")
        if t.is_on("rope_use_scale"):
            scaling = {
                "factor": 8,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position": 8192,
            }
            for name, value in scaling.items():
                t.set(f"model.rope_scaling.{name}", value, "rope_type", "model_name")
        else:
            t.set("model.rope_interleaved", True, "rope_use_scale")
    elif kind != "default":
        message = (
            f"{kind} is not translated; use default or llama3.1, and write model.rope_scaling.* "
            "and model.rope_interleaved into the result, where type=yarn is legal"
        )
        t.refuse("rope_type", message)
    elif factor != 1:
        if "model.rope_theta_local" in t.values:
            message = (
                "must be 1 with local_rope_max_timescale: model.rope_scaling leaves out local "
                f"layers, which MaxText's {t.text('decoder_block')} scales, too"
            )
            t.refuse("rope_linear_scaling_factor", message)
        t.set("model.rope_scaling.type", "linear", "rope_linear_scaling_factor")
        t.copy("rope_linear_scaling_factor")
