"""Configure parts of the model: experts, latent attention, adapters and scaled rotations."""

from dataclasses import dataclass

from maxpipe.config.catalog import DISPATCHES, GROUPED_KERNELS, ROUTERS
from maxpipe.config.sections.fields import hash_of_fields, option

ALL_LINEAR = "all-linear"
ATTENTION_PROJECTIONS = ("query", "key", "value", "out")
MLP_PROJECTIONS = ("gate", "up", "down")
PROJECTIONS = (*ATTENTION_PROJECTIONS, *MLP_PROJECTIONS)
_TYPE = "model.rope_scaling.type"
_SCALED = "model.rope_scaling.factor>1"


@dataclass(frozen=True)
class MoEConfig:
    """`model.moe.*`: routed experts, of which each token uses a few; 0 experts = a dense MLP.

    The other keys have no effect without experts.
    """

    experts: int = option(
        0,
        "number of routed experts in place of the MLP; 0 = a dense MLP",
        minimum=0,
        maximum=2**16,
    )
    per_token: int = option(2, "number of experts that each token uses", minimum=1)
    mlp_dim: int = option(0, "hidden width of an expert; 0 = model.mlp_dim", minimum=0)
    shared_experts: int = option(
        0,
        "number of experts that every token uses in addition, computed as one MLP that is as many "
        "times as wide",
        minimum=0,
    )
    router: str = option(
        "softmax", "how the router's logits become scores of experts", variants=ROUTERS
    )
    logit_bias: bool = option(
        False, "add a learned bias to the router's logits, for the choice and for the weights"
    )
    normalise: bool = option(
        True, "divide the weights of a token's experts by their sum; topk_softmax always does"
    )
    scale: float = option(1.0, "factor that multiplies the weights of a token's experts", above=0)
    groups: int = option(
        1, "number of equal groups of experts; a token chooses within its best groups", minimum=1
    )
    groups_per_token: int = option(
        1, "number of groups from which a token chooses its experts", minimum=1
    )
    selection_bias: bool = option(
        False,
        "add a bias of each expert to the scores, for the choice only; a bias_rate above 0 "
        "implies it",
    )
    bias_rate: float = option(
        0.0,
        "amount that each step adds to the selection bias of experts with less than the mean "
        "load, and subtracts for experts with more (Wang et al., arXiv:2408.15664); 0 = the bias "
        "stays",
        minimum=0,
    )
    balance_loss: float = option(
        0.0,
        "weight of the loss that balances the experts' load within each sequence "
        "(DeepSeek-V3, equations 17 to 20)",
        minimum=0,
    )
    z_loss: float = option(
        0.0,
        "weight of the penalty on the squared logarithm of the router's softmax denominator",
        minimum=0,
    )
    capacity_factor: float = option(
        0.0,
        "most tokens of a sequence that an expert takes, in multiples of an even share; later "
        "tokens do not get that expert. This bounds memory with mesh axis expert; 0 = no bound",
        minimum=0,
    )
    dispatch: str = option(
        "auto",
        "how tokens reach experts of other devices along mesh axis expert; auto = ring",
        variants=DISPATCHES,
        also=("auto",),
    )
    kernel: str = option(
        "auto",
        "how rows are multiplied with the weights of their experts; auto picks by backend",
        variants=GROUPED_KERNELS,
        also=("auto",),
    )

    @property
    def has_bias(self) -> bool:
        """Return whether each layer has a selection bias as a parameter."""
        return self.selection_bias or self.bias_rate > 0


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


@dataclass(frozen=True)
class LoRAConfig:
    """`model.lora.*`: LoRA (Hu et al. 2021); rank 0 trains all parameters and has no adapters.

    The other keys have no effect without a rank.
    """

    __hash__ = hash_of_fields

    rank: int = option(
        0,
        "rank of the adapters, and only adapters are trained; 0 = no adapters, all parameters are "
        "trained",
        minimum=0,
    )
    alpha: float = option(16.0, "adapters are multiplied by alpha / rank", above=0)
    targets: list[str] = option(  # noqa: RUF009
        [ALL_LINEAR],
        f"projections that have an adapter; {ALL_LINEAR} = all of them, without those of experts",
        choices=(*PROJECTIONS, ALL_LINEAR),
    )
    dropout: float = option(0.0, "dropout rate on the input of adapters", minimum=0, maximum=0.99)


@dataclass(frozen=True)
class RopeScalingConfig:
    """How rotary frequencies serve a longer context; factor 1 leaves them as they are."""

    __hash__ = hash_of_fields

    factor: float = option(
        1.0,
        "factor by which the context is longer than the original one; 1 = no scaling",
        minimum=1,
    )
    type: str = option(
        "llama3",
        "linear divides all frequencies; llama3 and yarn (NTK by parts) leave the fast "
        "ones unchanged; longrope divides each frequency by its own number",
        choices=("linear", "llama3", "yarn", "longrope"),
        acts_with=f"{_SCALED} or {_TYPE}=longrope or model.rope_scaling.attention_factor",
    )
    low_freq_factor: float = option(
        1.0,
        "wavelengths above original_max_position / this are scaled by the factor",
        above=0,
        acts_with=f"{_TYPE}=llama3 and {_SCALED}",
    )
    high_freq_factor: float = option(
        4.0,
        "wavelengths below original_max_position / this are not scaled",
        above=0,
        acts_with=f"{_TYPE}=llama3 and {_SCALED}",
    )
    original_max_position: int = option(
        8192,
        "context length that the unscaled frequencies were trained for, in tokens",
        minimum=1,
        acts_with=f"{_TYPE}=llama3|yarn|longrope and {_SCALED} or {_TYPE}=longrope",
    )
    beta_fast: float = option(
        32.0,
        "frequencies that turn more often than this within original_max_position are not scaled",
        above=0,
        acts_with=f"{_TYPE}=yarn and {_SCALED}",
    )
    beta_slow: float = option(
        1.0,
        "frequencies that turn less often than this within original_max_position are divided by "
        "the factor",
        above=0,
        acts_with=f"{_TYPE}=yarn and {_SCALED}",
    )
    truncate: bool = option(
        True,
        "round the bounds between the frequencies to whole numbers",
        acts_with=f"{_TYPE}=yarn and {_SCALED}",
    )
    attention_factor: float = option(
        0.0,
        "factor that multiplies rotated queries and keys; 0 = computed from factor",
        minimum=0,
        acts_with=f"{_TYPE}=yarn|longrope",
    )
    mscale_all_dim: float = option(
        0.0,
        "m in the factor (0.1 m ln(factor) + 1)^2 that multiplies attention scores in DeepSeek's "
        "models; 0 = no such factor",
        minimum=0,
        acts_with=f"{_TYPE}=yarn and {_SCALED}",
    )
    short_factor: list[float] = option(  # noqa: RUF009
        [],
        "divisor of each frequency for sequences up to original_max_position",
        acts_with=f"{_TYPE}=longrope",
    )
    long_factor: list[float] = option(  # noqa: RUF009
        [],
        "divisor of each frequency for longer sequences",
        acts_with=f"{_TYPE}=longrope",
    )
    length: str = option(
        "auto",
        "which of the two lists is used; auto decides by data.sequence_length",
        choices=("auto", "short", "long"),
        acts_with=f"{_TYPE}=longrope",
    )

    @property
    def is_scaled(self) -> bool:
        """Return whether anything differs from rotations without scaling."""
        by_yarn = self.type == "yarn" and self.attention_factor not in (0, 1)
        return self.factor != 1 or self.type == "longrope" or by_yarn
