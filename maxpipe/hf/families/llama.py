"""Translate Llama and types that differ by a few options from it."""

from typing import Any, ClassVar

from maxpipe.config.sections import ModelConfig
from maxpipe.hf.family import Family, listed_kinds
from maxpipe.hf.rope import Json


class Llama(Family):
    """Llama 2 to 3.3, and models of the same shape: SmolLM2, Yi, DeepSeek-R1-Distill-Llama."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"

    def read(self, c: Json) -> dict[str, object]:
        # One key stands for all four projections.
        bias = bool(c.get("attention_bias", False))
        return {
            "attention_bias": bias,
            "attention_output_bias": bias,
            "mlp_bias": bool(c.get("mlp_bias", False)),
        }

    def write(self, m: ModelConfig) -> dict[str, Any]:
        return {"attention_bias": m.attention_bias, "mlp_bias": m.mlp_bias}


class Mistral(Family):
    """Mistral 7B and Nemo; all layers have the window, if there is one."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    defaults: ClassVar = {"num_key_value_heads": 8, "sliding_window": 4096}
    windows = "all"


class Qwen2(Family):
    """Qwen2 and Qwen2.5: biases of queries, keys and values."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
    fixed: ClassVar = {"attention_bias": True}
    windows = "listed"

    def window(self, c: Json) -> int:
        return super().window(c) if c.get("use_sliding_window") else 0

    def kinds(self, c: Json) -> list[str]:
        first = c["max_window_layers"]
        by_rule = ["local" if i >= first else "global" for i in range(c["num_hidden_layers"])]
        return listed_kinds(c) or by_rule

    def write(self, m: ModelConfig) -> dict[str, Any]:
        return {"use_sliding_window": bool(m.attention_window)}


class Qwen3(Qwen2):
    """Qwen3: heads of queries and keys are normalised."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    defaults: ClassVar = {**Qwen2.defaults, "head_dim": 128}
    fixed: ClassVar = {"qk_norm": True}

    def read(self, c: Json) -> dict[str, object]:
        bias = bool(c.get("attention_bias", False))
        return {"attention_bias": bias, "attention_output_bias": bias}

    def write(self, m: ModelConfig) -> dict[str, Any]:
        return {**super().write(m), "attention_bias": m.attention_bias}


class Granite(Llama):
    """Granite 3: Llama with four multipliers."""

    model_type = "granite"
    architecture = "GraniteForCausalLM"

    def read(self, c: Json) -> dict[str, object]:
        if not c.get("logits_scaling", 1):
            raise ValueError("logits_scaling is 0, by which logits would be divided")
        return {
            **super().read(c),
            "embed_scale": float(c.get("embedding_multiplier", 1)),
            "residual_scale": float(c.get("residual_multiplier", 1)),
            "query_scale": float(c.get("attention_multiplier", 1)),
            "logit_scale": 1 / float(c.get("logits_scaling", 1)),
        }

    def write(self, m: ModelConfig) -> dict[str, Any]:
        return {
            **super().write(m),
            "embedding_multiplier": m.embed_scale,
            "residual_multiplier": m.residual_scale,
            "attention_multiplier": m.query_scale or m.head_dim**-0.5,
            "logits_scaling": 1 / m.logit_scale,
        }


class SmolLm3(Llama):
    """SmolLM3: every fourth layer has no rotary embedding."""

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    }
    theta = 2_000_000.0
    windows = "listed"

    def window(self, c: Json) -> int:
        return int(c.get("sliding_window") or 0) if c.get("use_sliding_window") else 0

    def kinds(self, c: Json) -> list[str]:
        number, interval = c["num_hidden_layers"], c["no_rope_layer_interval"]
        if not (c.get("no_rope_layers") or interval):
            raise ValueError("no_rope_layer_interval is 0, so that no layer is without rotation")
        is_rotated = c.get("no_rope_layers") or [(i + 1) % interval for i in range(number)]
        # By the class's rule, the layers without a rotation have windows.
        kinds = listed_kinds(c) or ["global" if rotated else "local" for rotated in is_rotated]
        return [
            kind if rotated else f"{kind}_nope"
            for kind, rotated in zip(kinds, is_rotated, strict=True)
        ]

    def write(self, m: ModelConfig) -> dict[str, Any]:
        return {
            **super().write(m),
            "no_rope_layers": [int(not kind.endswith("nope")) for kind in m.layer_kinds],
            "use_sliding_window": bool(m.attention_window),
        }


class Olmo2(Family):
    """OLMo 2."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    defaults: ClassVar = {"rms_norm_eps": 1e-5}
    fixed: ClassVar = {"norm_placement": "post", "qk_norm": True, "qk_norm_scope": "full"}

    def read(self, c: Json) -> dict[str, object]:
        bias = bool(c.get("attention_bias", False))
        return {"attention_bias": bias, "attention_output_bias": bias}

    def write(self, m: ModelConfig) -> dict[str, Any]:
        return {"attention_bias": m.attention_bias}


class Olmo3(Olmo2):
    """OLMo 3: three of four layers have a window, and rotate without the scaling of the others."""

    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    defaults: ClassVar = {**Olmo2.defaults, "sliding_window": 4096}
    windows = "listed"
    theta = 500_000.0
    theta_local = 500_000.0

    def kinds(self, c: Json) -> list[str]:
        by_rule = ["local" if (i + 1) % 4 else "global" for i in range(c["num_hidden_layers"])]
        return listed_kinds(c) or by_rule


class Phi3(Family):
    """Phi-3, Phi-3.5, Phi-4 and Phi-4-mini; all layers have the window, if there is one."""

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    defaults: ClassVar = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
    windows = "all"
    rotates_part = True
    fuses_projections = True
