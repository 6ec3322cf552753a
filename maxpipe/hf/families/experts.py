"""Translate types whose layers all have a mixture of experts in place of the MLP."""

from typing import Any, ClassVar

from maxpipe.config.sections import ModelConfig
from maxpipe.hf.family import Family
from maxpipe.hf.rope import Json


class Experts(Family):
    """A type that has no dense models."""

    def config(self, m: ModelConfig, sequence_length: int) -> dict[str, Any]:
        if not m.moe.experts:
            raise ValueError(f"{self.model_type} has no model.moe.experts=0")
        return super().config(m, sequence_length)


class Mixtral(Experts):
    """Mixtral; the weights of a token's experts add up to 1."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    theta = 1_000_000.0
    windows = "all"
    expert_names = "block_sparse_moe"

    def read(self, c: Json) -> dict[str, object]:
        return {
            "moe.experts": int(c["num_local_experts"]),
            "moe.per_token": int(c["num_experts_per_tok"]),
        }

    def write(self, m: ModelConfig) -> dict[str, Any]:
        return {
            "intermediate_size": m.expert_dim,
            "num_local_experts": m.moe.experts,
            "num_experts_per_tok": m.moe.per_token,
        }


class Qwen3Moe(Experts):
    """Qwen3 with experts; heads of queries and keys are normalised."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
    }
    fixed: ClassVar = {"qk_norm": True}
    windows = "all"

    def window(self, c: Json) -> int:
        return super().window(c) if c.get("use_sliding_window") else 0

    def read(self, c: Json) -> dict[str, object]:
        if c.get("mlp_only_layers") or c["decoder_sparse_step"] != 1:
            raise ValueError("has layers without experts, which must be alike here")
        bias = bool(c.get("attention_bias", False))
        return {
            "attention_bias": bias,
            "attention_output_bias": bias,
            "moe.mlp_dim": int(c["moe_intermediate_size"]),
            **_choice(c),
        }

    def write(self, m: ModelConfig) -> dict[str, Any]:
        return {
            "attention_bias": m.attention_bias,
            "use_sliding_window": bool(m.attention_window),
            "moe_intermediate_size": m.expert_dim,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            **_written_choice(m),
        }


class Olmoe(Experts):
    """OLMoE; all queries and all keys of a token are normalised at once."""

    model_type = "olmoe"
    architecture = "OlmoeForCausalLM"
    defaults: ClassVar = {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8}
    fixed: ClassVar = {"qk_norm": True, "qk_norm_scope": "full"}

    def read(self, c: Json) -> dict[str, object]:
        if c.get("clip_qkv") is not None:
            raise ValueError(f"clip_qkv {c['clip_qkv']} is no option of attention")
        bias = bool(c.get("attention_bias", False))
        return {"attention_bias": bias, "attention_output_bias": bias, **_choice(c)}

    def write(self, m: ModelConfig) -> dict[str, Any]:
        return {
            "attention_bias": m.attention_bias,
            "intermediate_size": m.expert_dim,
            **_written_choice(m),
        }


def _choice(c: Json) -> dict[str, object]:
    """Return how experts are chosen; transformers 5 calls their number `num_local_experts`."""
    return {
        "moe.experts": int(c.get("num_local_experts") or c["num_experts"]),
        "moe.per_token": int(c["num_experts_per_tok"]),
        "moe.normalise": bool(c.get("norm_topk_prob", False)),
    }


def _written_choice(m: ModelConfig) -> dict[str, Any]:
    return {
        "num_experts": m.moe.experts,
        "num_local_experts": m.moe.experts,
        "num_experts_per_tok": m.moe.per_token,
        "norm_topk_prob": m.moe.normalise,
    }
