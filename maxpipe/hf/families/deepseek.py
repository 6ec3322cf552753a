"""Translate DeepSeek-V3 and types with its experts: a biased sigmoid router, first dense layers."""

from typing import Any, ClassVar

from maxpipe.config.sections import ModelConfig
from maxpipe.hf.families.experts import Experts
from maxpipe.hf.rope import Json, write_rope


class BiasedExperts(Experts):
    """A type whose router chooses by the sigmoid of logits plus a bias, within groups."""

    def read(self, c: Json) -> dict[str, object]:
        kinds = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
        for key, value in kinds.items():
            if c.get(key, value) != value:
                raise ValueError(f"{key} {c[key]!r} is no option of the router, only {value!r}")
        return {
            "first_dense_layers": int(c["first_k_dense_replace"]),
            "moe.experts": int(c.get("num_local_experts") or c["n_routed_experts"]),
            "moe.per_token": int(c["num_experts_per_tok"]),
            "moe.mlp_dim": int(c["moe_intermediate_size"]),
            "moe.shared_experts": int(c["n_shared_experts"] or 0),
            "moe.router": "sigmoid",
            "moe.selection_bias": True,
            "moe.normalise": bool(c["norm_topk_prob"]),
            "moe.scale": float(c["routed_scaling_factor"]),
            "moe.groups": int(c["n_group"] or 1),
            "moe.groups_per_token": int(c["topk_group"] or 1),
        }

    def write(self, m: ModelConfig) -> dict[str, Any]:
        return {
            "first_k_dense_replace": m.first_dense_layers,
            "n_routed_experts": m.moe.experts,
            "num_experts_per_tok": m.moe.per_token,
            "moe_intermediate_size": m.expert_dim,
            "n_shared_experts": m.moe.shared_experts,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "norm_topk_prob": m.moe.normalise,
            "routed_scaling_factor": m.moe.scale,
            "n_group": m.moe.groups,
            "topk_group": m.moe.groups_per_token,
            "num_nextn_predict_layers": 0,
        }


class DeepseekV3(BiasedExperts):
    """DeepSeek-V3 and R1: latent attention; with yarn, scores have a factor of their own."""

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    defaults: ClassVar = {
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    fixed: ClassVar = {"attention_kind": "mla"}

    def read(self, c: Json) -> dict[str, object]:
        if c.get("attention_bias"):
            raise ValueError("attention_bias true is no option of latent attention")
        widths = {
            name: int(c[name] or 0)
            for name in (
                "q_lora_rank",
                "kv_lora_rank",
                "qk_nope_head_dim",
                "qk_rope_head_dim",
                "v_head_dim",
            )
        }
        rope = c.get("rope_scaling") or c.get("rope_parameters") or {}
        kind = rope.get("rope_type", rope.get("type"))
        return {
            **super().read(c),
            # In files head_dim, if given, is the number of rotated channels.
            "head_dim": widths["qk_nope_head_dim"] + widths["qk_rope_head_dim"],
            "num_kv_heads": int(c["num_attention_heads"]),
            "rope_interleaved": bool(c.get("rope_interleave", True)),
            "rope_scaling.mscale_all_dim": float(
                (rope.get("mscale_all_dim") or 0) if kind == "yarn" else 0
            ),
            **{f"mla.{name}": width for name, width in widths.items()},
        }

    def write(self, m: ModelConfig) -> dict[str, Any]:
        rope, scale = write_rope(m, by_kind=False), m.rope_scaling.mscale_all_dim
        if scale and rope["rope_scaling"]:
            # With two equal scales rotations have no factor except attention_factor; with one they
            # have the factor that follows from yarn's.
            scales = {"mscale_all_dim": scale}
            if m.rope_scaling.attention_factor:
                scales["mscale"] = scale
            for name in ("rope_scaling", "rope_parameters"):
                rope[name] = {**dict(rope[name]), **scales}  # type: ignore[call-overload]
        return {
            **super().write(m),
            **rope,
            "head_dim": m.mla.qk_rope_head_dim,
            "q_lora_rank": m.mla.q_lora_rank or None,
            "kv_lora_rank": m.mla.kv_lora_rank,
            "qk_nope_head_dim": m.mla.qk_nope_head_dim,
            "qk_rope_head_dim": m.mla.qk_rope_head_dim,
            "v_head_dim": m.mla.v_head_dim,
            "rope_interleave": m.rope_interleaved,
            "attention_bias": False,
        }


class Glm4Moe(BiasedExperts):
    """GLM-4.5 and 4.6: grouped-query attention; half of the channels are rotated."""

    model_type = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    rotates_part = True
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }

    def read(self, c: Json) -> dict[str, object]:
        return {
            **super().read(c),
            "attention_bias": bool(c.get("attention_bias", False)),
            "qk_norm": bool(c.get("use_qk_norm", False)),
        }

    def write(self, m: ModelConfig) -> dict[str, Any]:
        return {
            **super().write(m),
            "attention_bias": m.attention_bias,
            "use_qk_norm": m.qk_norm,
        }
