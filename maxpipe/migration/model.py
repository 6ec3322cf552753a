"""Translate the model: its decoder block, shape, switches and rotary embeddings."""

import math
from dataclasses import dataclass

from maxpipe.config.maxtext import KEYS
from maxpipe.migration.translator import Translator

KERNELS = {"autoselected": "auto", "dot_product": "dot_product", "flash": "splash"}
# MaxText's pair of activations, the gate's first -> ours. Its gelu is jax.nn.gelu, the tanh one.
ACTIVATIONS = {("silu", "linear"): "silu", ("gelu", "linear"): "gelu_tanh"}


@dataclass(frozen=True)
class Block:
    """A decoder block of MaxText with a counterpart here.

    Attributes:
      reads: the `SWITCHES` that the block reads; it ignores the others.
      has_experts: whether routed experts take the place of its MLP.
      kinds: kinds of the layers that one of MaxText's layers consists of, in model order; empty for
        a single one that attends to all earlier tokens.
      norm_eps: fixed epsilon of the block's own norms; 0 if the configuration sets it.
    """

    reads: frozenset[str] = frozenset()
    has_experts: bool = False
    kinds: tuple[str, ...] = ()
    norm_eps: float = 0

    @property
    def is_dense_llama(self) -> bool:
        """Return whether a layer is Llama's, whose weights `migration.weights` reads."""
        return not self.has_experts and not self.kinds

    @property
    def num_layers(self) -> int:
        """Return how many of our layers one of MaxText's consists of."""
        return max(1, len(self.kinds))


# Keys that `global_parameter_scale` multiplies.
_SIZES = (
    *("base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "base_mlp_dim"),
    "base_num_decoder_layers",
)
POST_NORMS = ("use_post_attn_norm", "use_post_ffw_norm")
# Keys that only some blocks read. MaxText silently ignores them in the others.
SWITCHES = (
    "use_qk_norm",
    "attention_bias",
    "attn_logits_soft_cap",
    "sliding_window_size",
    "local_rope_max_timescale",
    *POST_NORMS,
    "routed_bias",
    "mlp_bias",
)

BLOCKS = {
    "llama2": Block(frozenset({"attn_logits_soft_cap"})),
    "mistral": Block(),
    "qwen2": Block(frozenset({"use_qk_norm", "attention_bias"})),
    "qwen3": Block(frozenset({"use_qk_norm"})),
    "gemma2": Block(
        frozenset({"attn_logits_soft_cap", "sliding_window_size", *POST_NORMS})
        | {"local_rope_max_timescale"},
        kinds=("local", "global"),
        norm_eps=1e-6,
    ),
    "mixtral": Block(frozenset({"routed_bias", "mlp_bias"}), has_experts=True),
    "qwen3_moe": Block(frozenset({"use_qk_norm", "routed_bias", "mlp_bias"}), has_experts=True),
}
# Blocks that are not translated -> the file of configs/models that has such a model.
SHIPPED = {
    "gemma3": "gemma3-27b",
    "deepseek": "deepseek-v3",
    "gpt_oss": "gpt-oss-20b",
    "olmo3": "olmo3-7b",
}


def block_of(t: Translator) -> Block | None:
    """Return the decoder block; None if it has no counterpart."""
    return BLOCKS.get(t.text("decoder_block"))


def _refuse_block(t: Translator, name: str) -> None:
    instead = "model.from_hf=DIR takes models of docs/families.md"
    if file := SHIPPED.get(name):
        instead = f"start from configs/models/{file}.yml, or from model.from_hf=DIR"
    translated = ", ".join(BLOCKS)
    t.refuse("decoder_block", f"{name} is not translated; {instead}. Translated are {translated}")


def translate_switches(t: Translator, name: str, block: Block) -> None:
    """Copy the switches that a block reads, and note the others that are on."""
    for key in SWITCHES:
        is_on = t.value(key) not in (None, 0, -1)  # 0 is false, too
        if key in block.reads and key not in POST_NORMS:
            if is_on:
                t.copy(key)
        elif key not in block.reads and is_on:
            t.note(key, f"left out: MaxText's decoder_block={name} does not read it")


def translate_norms(t: Translator, block: Block) -> None:
    """Set where norms lie, and check the epsilon of a block that has its own."""
    attention, mlp = (key in block.reads and t.is_on(key) for key in POST_NORMS)
    if attention != mlp:
        off, on = POST_NORMS if mlp else reversed(POST_NORMS)
        t.refuse(off, f"must be true like {on}: model.norm_placement is one for both")
    elif attention:
        t.set("model.norm_placement", "sandwich", *POST_NORMS)
    eps = t.number("normalization_layer_epsilon")
    if block.norm_eps and eps != block.norm_eps:
        message = f"must be {block.norm_eps:g}, as in MaxText's layers in any case"
        t.refuse("normalization_layer_epsilon", message)


def translate_attention(t: Translator, name: str, block: Block) -> None:
    """Set kinds of layers and sinks, and check `attention_type`, which these blocks ignore."""
    if block.kinds:
        t.set("model.layer_pattern", list(block.kinds), "decoder_block")
    if t.is_on("attention_sink"):
        t.copy("attention_sink")
    kind = t.text("attention_type")
    if kind == "local_sliding":
        reason = f"left out: MaxText's decoder_block={name} does not read it"
        t.note("attention_type", f"{reason}; model.attention_window in the result has such layers")
    elif kind != "global":
        others = "model.attention_kind=mla or model.layer_pattern in the result"
        t.refuse("attention_type", f"{kind} is not translated; use global, and {others}")


def translate_experts(t: Translator, name: str, block: Block, width: int) -> None:
    """Set the routed experts: weights are the softmax over the logits of the chosen ones.

    `global_parameter_scale` multiplies their hidden width by `width`.
    """
    count = t.integer("num_experts", 1)
    if not block.has_experts:
        if count != 1:
            able = " and ".join(other for other, facts in BLOCKS.items() if facts.has_experts)
            t.refuse("num_experts", f"{count}, but {name} has no experts; {able} have")
        return
    t.copy("num_experts", "num_experts_per_tok")
    t.set("model.moe.router", "topk_softmax", "decoder_block")
    hidden = t.integer("base_moe_mlp_dim", -1)
    if hidden < 1:
        t.refuse("base_moe_mlp_dim", f"{hidden} is no width; MaxText needs it for experts, too")
    elif name != "qwen3_moe" and hidden != t.integer("base_mlp_dim"):
        message = f"{hidden} differs from base_mlp_dim, which MaxText refuses for {name}"
        t.refuse("base_moe_mlp_dim", message)
    t.set("model.moe.mlp_dim", width * hidden, "base_moe_mlp_dim")
    if t.number("capacity_factor") > 0 and not t.is_on("sparse_matmul"):
        remedy = "use -1, and model.moe.capacity_factor in the result, which bounds whole sequences"
        t.refuse("capacity_factor", f"MaxText bounds experts by parts of a sequence: {remedy}")
    elif t.number("capacity_factor") > 0:
        t.note("capacity_factor", "left out: MaxText does not read it with sparse_matmul=true")


def translate_model(t: Translator) -> None:
    """Set the model's shape and the switches of its block."""
    name = t.text("decoder_block")
    if name not in BLOCKS:
        _refuse_block(t, name)
        return
    block = BLOCKS[name]
    if t.text("load_parameters_path") and not block.is_dense_llama:
        message = f"weights of {name} are not read; init_from=hf:DIR reads those of Hugging Face"
        t.refuse("load_parameters_path", message)
    doublings = _doublings(t)
    for key, times in zip(_SIZES, doublings, strict=True):
        layers = block.num_layers if key == "base_num_decoder_layers" else 1
        t.set(KEYS[key].ours, 2**times * t.integer(key) * layers, key)
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


def _doublings(t: Translator) -> tuple[int, ...]:
    """Return how often `global_parameter_scale` doubles each of `_SIZES`."""
    scale = t.integer("global_parameter_scale", 1)
    if scale < 1 or scale.bit_count() != 1:
        t.refuse("global_parameter_scale", f"expected a power of two, got {scale}")
        return (0,) * 5
    every, left = divmod(scale.bit_length() - 1, 3)
    width, heads = every + (left > 1), every + (left > 0)
    return width, heads, heads, heads, every


def _translate_activation(t: Translator) -> None:
    value = t.value("mlp_activations")
    names = tuple(value) if isinstance(value, list) else (str(value),)
    if names in ACTIVATIONS:
        t.set("model.mlp_activation", ACTIVATIONS[names], "mlp_activations")
        return
    legal = " or ".join(f"[{', '.join(pair)}]" for pair in ACTIVATIONS)
    t.refuse("mlp_activations", f"[{', '.join(names)}] has no counterpart; use {legal}")


def _translate_logits(t: Translator, width: int) -> None:
    """Set scale and cap of the logits of tied embeddings, all that MaxText changes."""
    cap = t.number("final_logits_soft_cap")
    is_tied = t.is_on("logits_via_embedding")
    if t.is_on("normalize_embedding_logits") and is_tied:
        t.set("model.logit_scale", 1 / math.sqrt(width), "normalize_embedding_logits")
    if cap and not is_tied:
        t.note("final_logits_soft_cap", "left out: MaxText caps the logits of tied ones only")
    t.set("model.logit_soft_cap", cap if is_tied else 0.0, "final_logits_soft_cap")


def _translate_rope(t: Translator) -> None:
    """Set linear scaling, or Llama 3.1's, which MaxText applies to models called llama3.1*."""
    kind, factor = t.text("rope_type"), t.number("rope_linear_scaling_factor", 1)
    if t.text("model_name").startswith("llama3.1") or kind.startswith("llama3.1"):
        if factor != 1:
            t.note("rope_linear_scaling_factor", "left out: MaxText does not read it for llama3.1")
        if t.is_on("rope_use_scale"):
            scaling = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
            for name, value in {**scaling, "original_max_position": 8192}.items():
                t.set(f"model.rope_scaling.{name}", value, "rope_type", "model_name")
        else:
            t.set("model.rope_interleaved", True, "rope_use_scale")
    elif kind != "default":
        remedy = "use default or llama3.1, and write model.rope_scaling.* into the result"
        t.refuse("rope_type", f"{kind} is not translated; {remedy}")
    elif factor != 1:
        if "model.rope_theta_local" in t.values:
            reason = "model.rope_scaling leaves out local layers, which MaxText scales, too"
            message = f"must be 1 with local_rope_max_timescale: {reason}"
            t.refuse("rope_linear_scaling_factor", message)
        t.set("model.rope_scaling.type", "linear", "rope_linear_scaling_factor")
        t.copy("rope_linear_scaling_factor")
