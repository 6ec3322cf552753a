"""Translate the model: its shape, the switches of its block, its rotary embeddings."""

from maxpipe.migration.translator import Translator

BLOCKS = ("llama2", "mistral", "qwen2", "qwen3")  # all are the block `llama` here
READS_QK_NORM = ("qwen2", "qwen3")
READS_BIAS = ("qwen2",)
KERNELS = {"autoselected": "auto", "dot_product": "dot_product", "flash": "splash"}


def translate_model(t: Translator) -> None:
    """Set the model's shape and the switches of its block."""
    block = t.text("decoder_block")
    if block not in BLOCKS:
        t.refuse("decoder_block", f"{block} has no counterpart; there are {', '.join(BLOCKS)}")
        return
    for key, ours, doublings in zip(*_sizes(), _doublings(t), strict=True):
        t.set(f"model.{ours}", 2**doublings * t.integer(key), key)
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
    t.set("model.logit_soft_cap", t.number("final_logits_soft_cap"), "final_logits_soft_cap")
    dropout = t.number("dropout_rate") if t.is_on("enable_dropout") else 0
    t.set("model.dropout", dropout, "dropout_rate", "enable_dropout")
    if dropout:
        t.note("dropout_rate", "the masks lie on the outputs of attention and MLP")
    for key, readers in (("use_qk_norm", READS_QK_NORM), ("attention_bias", READS_BIAS)):
        if t.is_on(key) and block in readers:
            t.copy(key)
        elif t.is_on(key):
            t.note(key, f"left out: MaxText's decoder_block={block} does not read it")
    if t.is_on("logits_via_embedding") and t.is_on("normalize_embedding_logits"):
        message = "MaxText divides the logits of tied embeddings by a root of the width; set false"
        t.refuse("normalize_embedding_logits", message)
    attention = t.text("attention")
    t.set("model.attention", KERNELS.get(attention, "auto"), "attention")
    if attention not in KERNELS or (attention == "flash" and t.text("hardware") != "tpu"):
        t.set("model.attention", "auto", "attention")
        t.note("attention", "model.attention=auto picks a kernel by backend")
    _translate_rope(t)


def _sizes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return MaxText's keys that the scale multiplies, and the names of ours."""
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


def _translate_rope(t: Translator) -> None:
    """Set Llama 3.1's scaling, which MaxText has for model names that begin so."""
    kind = t.text("rope_type")
    if t.text("model_name").startswith("llama3.1") or kind.startswith("llama3.1"):
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
        t.refuse("rope_type", f"{kind} has no counterpart; use default or llama3.1")
