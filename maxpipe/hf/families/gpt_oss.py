"""Translate gpt-oss: sinks, windows in every other layer, biased experts, a clamped SwiGLU."""

from typing import Any, ClassVar

from maxpipe.config.sections import ModelConfig
from maxpipe.hf.families.experts import Experts
from maxpipe.hf.family import listed_kinds
from maxpipe.hf.rope import Json

_ALPHA = 1.702  # of quick_gelu


class GptOss(Experts):
    """gpt-oss 20B and 120B; files have the weights of experts in mxfp4 or in bfloat16."""

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
