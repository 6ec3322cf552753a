"""Translate types whose layers all have a mixture of experts in place of the MLP."""

from typing import Any, ClassVar

from maxpipe.config.sections import ModelConfig
from maxpipe.hf.family import Family, listed_kinds
from maxpipe.hf.rope import Json

_ALPHA = 1.702  # of quick_gelu


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


class GptOss(Experts):
    """gpt-oss 20B and 120B: sinks, windows in every other layer, biased experts, clamped SwiGLU."""

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "swiglu_alpha": _ALPHA,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    }
    fixed: ClassVar = {
        "attention_sinks": True,
        "mlp_activation": "quick_gelu",
        "mlp_up_offset": 1.0,
        "mlp_bias": True,
        "moe.router": "topk_softmax",
        "moe.logit_bias": True,
    }
    theta = 150_000.0
    windows = "listed"
    expert_names = "router"

    def kinds(self, c: Json) -> list[str]:
        by_rule = ["global" if i % 2 else "local" for i in range(c["num_hidden_layers"])]
        return listed_kinds(c) or by_rule

    def read(self, c: Json) -> dict[str, object]:
        if c["swiglu_alpha"] != _ALPHA:
            raise ValueError(
                f"swiglu_alpha {c['swiglu_alpha']} is not {_ALPHA}, that of quick_gelu"
            )
        bias = bool(c["attention_bias"])
        return {
            "attention_bias": bias,
            "attention_output_bias": bias,
            "mlp_limit": float(c["swiglu_limit"]),
            "moe.experts": int(c["num_local_experts"]),
            "moe.per_token": int(c["num_experts_per_tok"]),
        }

    def write(self, m: ModelConfig) -> dict[str, Any]:
        return {
            "attention_bias": m.attention_bias,
            "hidden_act": "silu",
            "intermediate_size": m.expert_dim,
            "num_local_experts": m.moe.experts,
            "num_experts_per_tok": m.moe.per_token,
            "swiglu_alpha": _ALPHA,
            "swiglu_limit": m.mlp_limit,
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
