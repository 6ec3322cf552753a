"""Configure a mixture of experts in the place of a layer's MLP, `model.moe.*`."""

from dataclasses import dataclass

from maxpipe.config.catalog import DISPATCHES, GROUPED_KERNELS, ROUTERS
from maxpipe.config.sections.fields import option


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
