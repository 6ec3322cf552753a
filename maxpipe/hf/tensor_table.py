"""List the tensors of Hugging Face's files, each with the parameter that it holds.

A pattern has the tensor's dimensions on the left, one layer's parameter's on the right. Those in
brackets are one dimension of the tensor. Letters: v vocabulary, d embed, h heads, c head_dim, f
hidden width of the MLP, l width of a latent, e experts.
"""

from typing import TypeAlias

Path: TypeAlias = tuple[str, ...]  # path of a parameter

_ATTENTION, _MLP = ("layers", "attention"), ("layers", "mlp")

# Parameter -> (name of the tensor, pattern).
LAYER = "model.layers.{layer}."
NAMES: dict[Path, tuple[str, str]] = {
    ("embed", "embedding"): ("model.embed_tokens.weight", "v d -> v d"),
    ("head", "norm", "scale"): ("model.norm.weight", "d -> d"),
    ("head", "kernel"): ("lm_head.weight", "v d -> d v"),
    (*_ATTENTION, "query"): ("self_attn.q_proj.weight", "(h c) d -> d h c"),
    (*_ATTENTION, "key"): ("self_attn.k_proj.weight", "(h c) d -> d h c"),
    (*_ATTENTION, "value"): ("self_attn.v_proj.weight", "(h c) d -> d h c"),
    (*_ATTENTION, "out"): ("self_attn.o_proj.weight", "d (h c) -> h c d"),
    (*_ATTENTION, "query_bias"): ("self_attn.q_proj.bias", "(h c) -> h c"),
    (*_ATTENTION, "key_bias"): ("self_attn.k_proj.bias", "(h c) -> h c"),
    (*_ATTENTION, "value_bias"): ("self_attn.v_proj.bias", "(h c) -> h c"),
    (*_ATTENTION, "out_bias"): ("self_attn.o_proj.bias", "d -> d"),
    (*_ATTENTION, "sinks"): ("self_attn.sinks", "h -> h"),
    (*_ATTENTION, "query_down"): ("self_attn.q_a_proj.weight", "l d -> d l"),
    (*_ATTENTION, "query_latent_norm", "scale"): ("self_attn.q_a_layernorm.weight", "l -> l"),
    (*_ATTENTION, "query_up"): ("self_attn.q_b_proj.weight", "(h c) l -> l h c"),
    (*_ATTENTION, "key_value_down"): ("self_attn.kv_a_proj_with_mqa.weight", "l d -> d l"),
    (*_ATTENTION, "key_value_latent_norm", "scale"): ("self_attn.kv_a_layernorm.weight", "l -> l"),
    (*_ATTENTION, "key_value_up"): ("self_attn.kv_b_proj.weight", "(h c) l -> l h c"),
    (*_MLP, "gate"): ("mlp.gate_proj.weight", "f d -> d f"),
    (*_MLP, "up"): ("mlp.up_proj.weight", "f d -> d f"),
    (*_MLP, "down"): ("mlp.down_proj.weight", "d f -> f d"),
    (*_MLP, "gate_bias"): ("mlp.gate_proj.bias", "f -> f"),
    (*_MLP, "up_bias"): ("mlp.up_proj.bias", "f -> f"),
    (*_MLP, "down_bias"): ("mlp.down_proj.bias", "d -> d"),
}
# Parameters of experts, by naming scheme. Each expert has tensors of its own, except where noted.
_MOE = ("layers", "moe")
EXPERTS: dict[str, dict[Path, tuple[str, str]]] = {
    "mlp": {
        (*_MOE, "router"): ("mlp.gate.weight", "e d -> d e"),
        (*_MOE, "bias"): ("mlp.gate.e_score_correction_bias", "e -> e"),
        (*_MOE, "shared", "gate"): ("mlp.shared_experts.gate_proj.weight", "f d -> d f"),
        (*_MOE, "shared", "up"): ("mlp.shared_experts.up_proj.weight", "f d -> d f"),
        (*_MOE, "shared", "down"): ("mlp.shared_experts.down_proj.weight", "d f -> f d"),
        (*_MOE, "gate"): ("mlp.experts.{expert}.gate_proj.weight", "f d -> d f"),
        (*_MOE, "up"): ("mlp.experts.{expert}.up_proj.weight", "f d -> d f"),
        (*_MOE, "down"): ("mlp.experts.{expert}.down_proj.weight", "d f -> f d"),
    },
    "block_sparse_moe": {
        (*_MOE, "router"): ("block_sparse_moe.gate.weight", "e d -> d e"),
        (*_MOE, "gate"): ("block_sparse_moe.experts.{expert}.w1.weight", "f d -> d f"),
        (*_MOE, "up"): ("block_sparse_moe.experts.{expert}.w3.weight", "f d -> d f"),
        (*_MOE, "down"): ("block_sparse_moe.experts.{expert}.w2.weight", "d f -> f d"),
    },
    # One tensor holds all experts, and another one all their biases.
    "router": {
        (*_MOE, "router"): ("mlp.router.weight", "e d -> d e"),
        (*_MOE, "logit_bias"): ("mlp.router.bias", "e -> e"),
        (*_MOE, "gate"): ("mlp.experts.gate_up_proj", "e d f -> e d f"),
        (*_MOE, "up"): ("mlp.experts.gate_up_proj", "e d f -> e d f"),
        (*_MOE, "down"): ("mlp.experts.down_proj", "e f d -> e f d"),
        (*_MOE, "gate_bias"): ("mlp.experts.gate_up_proj_bias", "e f -> e f"),
        (*_MOE, "up_bias"): ("mlp.experts.gate_up_proj_bias", "e f -> e f"),
        (*_MOE, "down_bias"): ("mlp.experts.down_proj_bias", "e d -> e d"),
    },
}
# Tensors whose last dimension alternates between elements of these parameters.
INTERLEAVED: dict[str, tuple[Path, ...]] = {
    name: ((*_MOE, f"gate{kind}"), (*_MOE, f"up{kind}"))
    for name, kind in (
        ("mlp.experts.gate_up_proj", ""),
        ("mlp.experts.gate_up_proj_bias", "_bias"),
    )
}
# Norms are named after their places, which differ between the placements.
NORMS: dict[str, dict[str, str]] = {
    "pre": {"attention_norm": "input", "mlp_norm": "post_attention"},
    "sandwich": {
        "attention_norm": "input",
        "attention_post_norm": "post_attention",
        "mlp_norm": "pre_feedforward",
        "mlp_post_norm": "post_feedforward",
    },
    "post": {"attention_post_norm": "post_attention", "mlp_post_norm": "post_feedforward"},
}
# Tensors of a type that fuses projections, each with the parameters that share its rows.
FUSED: dict[str, tuple[Path, ...]] = {
    "self_attn.qkv_proj.weight": tuple((*_ATTENTION, n) for n in ("query", "key", "value")),
    "mlp.gate_up_proj.weight": tuple((*_MLP, n) for n in ("gate", "up")),
}
