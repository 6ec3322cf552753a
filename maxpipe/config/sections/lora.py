"""Configure low-rank adapters of projections, `model.lora.*`."""

from dataclasses import dataclass

from maxpipe.config.sections.fields import hash_of_fields, option

ALL_LINEAR = "all-linear"
ATTENTION_PROJECTIONS = ("query", "key", "value", "out")
MLP_PROJECTIONS = ("gate", "up", "down")
PROJECTIONS = (*ATTENTION_PROJECTIONS, *MLP_PROJECTIONS)


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
        f"projections that have an adapter: {', '.join(PROJECTIONS)}; {ALL_LINEAR} = all of them, "
        "without those of experts",
    )
    dropout: float = option(0.0, "dropout rate on the input of adapters", minimum=0, maximum=0.99)
