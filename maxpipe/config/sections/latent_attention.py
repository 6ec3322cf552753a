"""Configure multi-head latent attention, `model.mla.*`."""

from dataclasses import dataclass

from maxpipe.config.sections.fields import option

ATTENTION_KINDS = ("gqa", "mla")


@dataclass(frozen=True)
class MLAConfig:
    """`model.mla.*`: widths of `model.attention_kind=mla` (DeepSeek-V2, 2024, section 2.1).

    Keys and values of all heads are made of one latent per token. The keys have no effect with
    another kind of attention.
    """

    q_lora_rank: int = option(
        0,
        "width of the latent from which queries are projected; 0 = queries are projected from "
        "activations",
        minimum=0,
    )
    kv_lora_rank: int = option(
        512, "width of the latent from which keys and values of all heads are projected", minimum=1
    )
    qk_nope_head_dim: int = option(
        128, "channels of a head's query and key that are not rotated", minimum=1
    )
    qk_rope_head_dim: int = option(
        64,
        "rotated channels of a head's query; the key's rotated channels are shared by all heads",
        minimum=2,
    )
    v_head_dim: int = option(128, "channels of a head's value", minimum=1)

    @property
    def head_dim(self) -> int:
        """Return the number of channels of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_width(self) -> int:
        """Return how many values generation keeps per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim
