"""Configure parts of the model: experts, latent attention, adapters and scaled rotations."""

import functools
from dataclasses import dataclass

from maxpipe.config.catalog import DISPATCHES, GROUPED_KERNELS, ROUTERS
from maxpipe.config.sections.fields import amount, hash_of_fields, option

ALL_LINEAR = "all-linear"
ATTENTION_PROJECTIONS = ("query", "key", "value", "out")
MLP_PROJECTIONS = ("gate", "up", "down")
PROJECTIONS = (*ATTENTION_PROJECTIONS, *MLP_PROJECTIONS)
_TYPE = "model.rope_scaling.type"
_SCALED = "model.rope_scaling.factor>1"
_of_llama3 = functools.partial(option, acts_with=f"{_TYPE}=llama3 and {_SCALED}")
_of_yarn = functools.partial(option, acts_with=f"{_TYPE}=yarn and {_SCALED}")
_of_longrope = functools.partial(option, acts_with=f"{_TYPE}=longrope")


@dataclass(frozen=True)
class MoEConfig:
    """`model.moe.*`: routed experts, of which each token uses a few; 0 experts = a dense MLP."""

    experts: int = amount(0, "routed experts in place of the MLP; 0 = a dense MLP", maximum=2**16)
    per_token: int = option(2, "experts that each token uses", minimum=1)
    mlp_dim: int = amount(0, "hidden width of an expert; 0 = model.mlp_dim")
    shared_experts: int = amount(0, "experts that every token uses as well, as one wide MLP")
    router: str = option("softmax", "how logits become scores of experts", variants=ROUTERS)
    logit_bias: bool = option(False, "a learned bias of the logits, for choice and weights")
    normalise: bool = option(True, "divide the weights of a token's experts by their sum")
    scale: float = option(1.0, "factor of the weights of a token's experts", above=0)
    groups: int = option(1, "equal groups of experts; a token uses the best of them", minimum=1)
    groups_per_token: int = option(1, "groups from which a token chooses its experts", minimum=1)
    selection_bias: bool = option(False, "a bias of each expert's score, for the choice alone")
    bias_rate: float = amount(0.0, "step of the selection bias toward even load (arXiv:2408.15664)")
    balance_loss: float = amount(0.0, "weight of the loss for even load (DeepSeek-V3, eq. 17-20)")
    z_loss: float = amount(0.0, "weight of the penalty on squared logs of the router's denominator")
    capacity_factor: float = amount(
        0.0,
        "most tokens of a sequence that an expert takes, in even shares; 0 = no bound",
        needs="model.moe.experts and mesh.ici.context=1 and mesh.dcn.context=1",
    )
    dispatch: str = option(
        "auto", "how tokens reach other devices; auto = ring", variants=DISPATCHES, also=("auto",)
    )
    kernel: str = option(
        "auto", "kernel of the experts; auto by backend", variants=GROUPED_KERNELS, also=("auto",)
    )

    @property
    def has_bias(self) -> bool:
        """Return whether each layer has a selection bias as a parameter."""
        return self.selection_bias or self.bias_rate > 0


@dataclass(frozen=True)
class MLAConfig:
    """`model.mla.*`: widths of multi-head latent attention (DeepSeek-V2, 2024, section 2.1).

    Keys and values of all heads are made of one latent per token.
    """

    q_lora_rank: int = amount(0, "width of the latent of queries; 0 = queries have none")
    kv_lora_rank: int = option(512, "width of the latent of keys and values", minimum=1)
    qk_nope_head_dim: int = option(128, "channels of queries and keys not rotated", minimum=1)
    qk_rope_head_dim: int = option(64, "rotated channels; those of keys are shared", minimum=2)
    v_head_dim: int = option(128, "channels of a head's value", minimum=1)

    @property
    def head_dim(self) -> int:
        """Return the number of channels of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_width(self) -> int:
        """Return how many values generation keeps per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class LoRAConfig:
    """`model.lora.*`: LoRA (Hu et al. 2021); rank 0 trains all parameters and has no adapters."""

    __hash__ = hash_of_fields

    rank: int = amount(0, "rank of adapters; 0 = no adapters", needs="model.attention_kind=gqa")
    alpha: float = option(16.0, "adapters are multiplied by alpha / rank", above=0)
    targets: list[str] = option(
        [ALL_LINEAR],
        f"projections that have an adapter; {ALL_LINEAR} = all of them, without those of experts",
        choices=(*PROJECTIONS, ALL_LINEAR),
    )
    dropout: float = amount(0.0, "dropout rate on the input of adapters", maximum=0.99)


@dataclass(frozen=True)
class RopeScalingConfig:
    """How rotary frequencies serve a longer context; factor 1 leaves them as they are."""

    __hash__ = hash_of_fields

    factor: float = option(1.0, "how many times longer the context is; 1 = no scaling", minimum=1)
    type: str = option(
        "llama3",
        "linear divides all frequencies, llama3 and yarn the slow ones, longrope each by its own",
        choices=("linear", "llama3", "yarn", "longrope"),
        acts_with=f"{_SCALED} or {_TYPE}=longrope or model.rope_scaling.attention_factor",
    )
    low_freq_factor: float = _of_llama3(
        1.0, "wavelengths above original_max_position / this are scaled", above=0
    )
    high_freq_factor: float = _of_llama3(
        4.0, "wavelengths below original_max_position / this are not scaled", above=0
    )
    original_max_position: int = option(
        8192,
        "context length that the unscaled frequencies were trained for, in tokens",
        minimum=1,
        acts_with=f"{_TYPE}=llama3|yarn|longrope and {_SCALED} or {_TYPE}=longrope",
    )
    beta_fast: float = _of_yarn(32.0, "frequencies that turn more often are not scaled", above=0)
    beta_slow: float = _of_yarn(1.0, "frequencies that turn less often are divided", above=0)
    truncate: bool = _of_yarn(True, "round the bounds of beta_fast and beta_slow to whole channels")
    attention_factor: float = amount(
        0.0, "factor of queries and keys; 0 = auto", acts_with=f"{_TYPE}=yarn|longrope"
    )
    mscale_all_dim: float = _of_yarn(
        0.0, "m in the factor (0.1 m ln(factor) + 1)^2 of scores; 0 = none", minimum=0
    )
    short_factor: list[float] = _of_longrope([], "divisor of each frequency for shorter sequences")
    long_factor: list[float] = _of_longrope([], "divisor of each frequency for longer sequences")
    length: str = _of_longrope(
        "auto", "list in use; auto by data.sequence_length", choices=("auto", "short", "long")
    )

    @property
    def is_scaled(self) -> bool:
        """Return whether anything differs from rotations without scaling."""
        by_yarn = self.type == "yarn" and self.attention_factor not in (0, 1)
        return self.factor != 1 or self.type == "longrope" or by_yarn
