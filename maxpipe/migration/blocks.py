"""List what each translated decoder block of MaxText reads, and which files replace others."""

from dataclasses import dataclass

from maxpipe.migration.translator import Translator


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
        frozenset(
            {
                "attn_logits_soft_cap",
                "sliding_window_size",
                "local_rope_max_timescale",
                *POST_NORMS,
            }
        ),
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


def layers_per_layer(t: Translator) -> int:
    """Return how many of our layers one of MaxText's consists of: two for gemma2."""
    block = block_of(t)
    return block.num_layers if block else 1


def missing_block(name: str) -> str:
    """Return why a decoder block is not translated, and what to use instead."""
    translated = f"those of {', '.join(BLOCKS)} are"
    if file := SHIPPED.get(name):
        return (
            f"{name} is not translated ({translated}), but maxpipe has such a model: start from "
            f"configs/models/{file}.yml, or from model.from_hf=DIR for other sizes"
        )
    return (
        f"{name} is not translated ({translated}); model.from_hf=DIR takes the model of a Hugging "
        "Face config.json, if its type is one of docs/families.md"
    )


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
        message = f"must be true like {on}: model.norm_placement is one for attention and MLP"
        t.refuse(off, message)
    elif attention:
        t.set("model.norm_placement", "sandwich", *POST_NORMS)
    eps = t.number("normalization_layer_epsilon")
    if block.norm_eps and eps != block.norm_eps:
        message = (
            f"must be {block.norm_eps:g}, which the norms of MaxText's layers have in any case; "
            "model.norm_eps is one for all norms"
        )
        t.refuse("normalization_layer_epsilon", message)


def translate_attention(t: Translator, name: str, block: Block) -> None:
    """Set kinds of layers and sinks, and check `attention_type`, which these blocks ignore."""
    if block.kinds:
        t.set("model.layer_pattern", list(block.kinds), "decoder_block")
    if t.is_on("attention_sink"):
        t.copy("attention_sink")
    kind = t.text("attention_type")
    if kind == "local_sliding":
        message = (
            f"left out: MaxText's decoder_block={name} does not read it; model.attention_window in "
            "the result gives all layers a window"
        )
        t.note("attention_type", message)
    elif kind == "mla":
        message = (
            "mla is not translated: write model.attention_kind=mla with the widths of model.mla.* "
            "into a translation without it, or start from configs/models/deepseek-v3.yml"
        )
        t.refuse("attention_type", message)
    elif kind != "global":
        message = (
            f"{kind} has no counterpart; use global, and model.attention_window or "
            "model.layer_pattern in the result for layers that see less"
        )
        t.refuse("attention_type", message)


def translate_experts(t: Translator, name: str, block: Block, width: int) -> None:
    """Set the routed experts: weights are the softmax over the logits of the chosen ones.

    Args:
      t: the translator of the configuration.
      name: name of the block.
      block: properties of the block.
      width: factor by which `global_parameter_scale` multiplies the hidden width.
    """
    count = t.integer("num_experts", 1)
    if not block.has_experts:
        if count != 1:
            able = " and ".join(other for other, facts in BLOCKS.items() if facts.has_experts)
            message = (
                f"{count}, but decoder_block={name} has no experts; {able} have, which become "
                "model.moe.*"
            )
            t.refuse("num_experts", message)
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
        message = (
            "MaxText bounds experts by parts of a sequence: use -1, and model.moe.capacity_factor "
            "in the result, which bounds them by whole sequences"
        )
        t.refuse("capacity_factor", message)
    elif t.number("capacity_factor") > 0:
        t.note("capacity_factor", "left out: MaxText does not read it with sparse_matmul=true")
