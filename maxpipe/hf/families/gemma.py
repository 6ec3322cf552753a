"""Translate Gemma 2 and 3: windows, norms around sublayers, 1 + scale, GeGLU, scaled embeddings."""

from typing import Any, ClassVar

from maxpipe.config.sections import ModelConfig
from maxpipe.hf.family import Family, listed_kinds
from maxpipe.hf.rope import Json

_FIXED = {"norm_placement": "sandwich", "norm_offset": True}


class Gemma2(Family):
    """Gemma 2: every other layer has a window; scores and logits are capped."""

    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    activation_key = "hidden_activation"
    interval = 2  # every `interval`-th layer sees all tokens
    defaults: ClassVar = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    fixed = _FIXED
    windows = "listed"

    def kinds(self, c: Json) -> list[str]:
        interval = c.get("sliding_window_pattern") or c.get("_sliding_window_pattern")
        interval = interval or self.interval
        by_rule = [
            "local" if (i + 1) % interval else "global" for i in range(c["num_hidden_layers"])
        ]
        return listed_kinds(c) or by_rule

    def read(self, c: Json) -> dict[str, object]:
        if c.get("use_bidirectional_attention"):
            raise ValueError("use_bidirectional_attention makes it an encoder; attention is causal")
        if c["query_pre_attn_scalar"] <= 0:
            raise ValueError(f"query_pre_attn_scalar is {c['query_pre_attn_scalar']}, not above 0")
        bias = bool(c.get("attention_bias", False))
        return {
            "attention_bias": bias,
            "attention_output_bias": bias,
            "embed_scale": c["hidden_size"] ** 0.5,
            "query_scale": float(c["query_pre_attn_scalar"]) ** -0.5,
            "attention_soft_cap": float(c.get("attn_logit_softcapping") or 0),
            "logit_soft_cap": float(c.get("final_logit_softcapping") or 0),
        }

    def write(self, m: ModelConfig) -> dict[str, Any]:
        # transformers takes whole numbers only, so other scales are refused.
        scalar = round((m.query_scale or m.head_dim**-0.5) ** -2)
        return {
            "attention_bias": m.attention_bias,
            "query_pre_attn_scalar": max(scalar, 1),
            "attn_logit_softcapping": m.attention_soft_cap or None,
            "final_logit_softcapping": m.logit_soft_cap or None,
            "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(m.mlp_activation, "silu"),
        }


class Gemma3(Gemma2):
    """The text part of Gemma 3: five of six layers have a window and a rotation of their own.

    transformers' class has the key of a cap on scores, but does not apply it.
    """

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    interval = 6
    defaults: ClassVar = {
        **Gemma2.defaults,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "vocab_size": 262_208,
    }
    fixed: ClassVar = {**_FIXED, "qk_norm": True}
    theta = 1_000_000.0
    theta_local = 10_000.0

    def read(self, c: Json) -> dict[str, object]:
        if c["attn_logit_softcapping"]:
            raise ValueError(
                f"attn_logit_softcapping={c['attn_logit_softcapping']} is not supported: this type "
                "does not cap attention scores"
            )
        return super().read(c)

    def write(self, m: ModelConfig) -> dict[str, Any]:
        return {**super().write(m), "attn_logit_softcapping": None}
