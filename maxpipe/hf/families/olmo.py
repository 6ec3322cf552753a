"""Translate OLMo 2 and 3: norms after the sublayers, and over all queries and all keys at once."""

from typing import Any, ClassVar

from maxpipe.config.sections import ModelConfig
from maxpipe.hf.family import Family, listed_kinds
from maxpipe.hf.rope import Json


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
