"""Translate Phi-3 and Phi-4: Llama with fused projections, partly rotated heads, longrope."""

from typing import ClassVar

from maxpipe.hf.family import Family


class Phi3(Family):
    """Phi-3, Phi-3.5, Phi-4 and Phi-4-mini; all layers have the window, if there is one."""

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    defaults: ClassVar = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
    windows = "all"
    rotates_part = True
    fuses_projections = True
