"""Configure the model: its shape and the options of its decoder block, `model.*`."""

from dataclasses import dataclass, field, replace

from maxpipe.config.catalog import BLOCKS, KERNELS
from maxpipe.config.sections.fields import amount, derived, hash_of_fields, option
from maxpipe.config.sections.model_parts import (
    ALL_LINEAR,
    ATTENTION_PROJECTIONS,
    PROJECTIONS,
    LoRAConfig,
    MLAConfig,
    MoEConfig,
    RopeScalingConfig,
)

DTYPES = ("float32", "bfloat16")
QUANTISATIONS = ("none", "int8", "fp8")
LAYER_KINDS = ("global", "local", "global_nope", "local_nope")

_GROUPED = "model.attention_kind=gqa"


@dataclass(frozen=True)
class ModelConfig:
    __hash__ = hash_of_fields

    from_hf: str = option("", "folder with a config.json, the shape: DIR, s3://, gs://, org/name")
    block: str = option("llama", "decoder block", variants=BLOCKS)
    num_layers: int = option(8, "decoder layers", minimum=1, maximum=2**14)
    first_dense_layers: int = amount(
        0, "first layers with a dense MLP; they run outside the pipeline", needs="model.moe.experts"
    )
    embed_dim: int = option(256, "width of the residual stream", minimum=1)
    num_query_heads: int = option(4, "query heads", minimum=1, maximum=2**20)
    num_kv_heads: int = option(4, "key/value heads; must divide num_query_heads", minimum=1)
    head_dim: int = derived("width of a head; -1 = embed_dim / num_query_heads, or model.mla's")
    mlp_dim: int = option(1024, "hidden width of the gated MLP", minimum=1)
    vocab_size: int = option(320, "rows of the embedding; at least the tokenizer's ids", minimum=2)
    unpadded_vocab_size: int = derived(
        "token ids that exist; further rows are padding; -1 = vocab_size", minimum=2
    )
    dtype: str = option("float32", "dtype of activations and matrix products", choices=DTYPES)
    param_dtype: str = option("float32", "dtype in which parameters are stored", choices=DTYPES)
    # No kernel of experts multiplies in 8 bits.
    quantisation: str = option(
        "none",
        "8-bit format of the products of attention and MLP",
        choices=QUANTISATIONS,
        needs="model.moe.experts=0",
    )
    quantised_passes: str = option(
        "forward",
        "products in 8 bits: the forward's; full = also those for gradients of activations",
        choices=("forward", "full"),
        needs="model.quantisation=int8|fp8",
    )
    tie_embeddings: bool = option(False, "use the embedding table as output projection, too")
    embed_scale: float = option(1.0, "factor of embeddings; Gemma's is the root of embed_dim")
    residual_scale: float = option(1.0, "factor of what attention and MLP add to the residual")
    logit_scale: float = option(1.0, "factor of logits, before a soft cap", above=0)
    dropout: float = amount(0.0, "dropout rate on the output of attention and MLP", maximum=0.99)
    z_loss: float = amount(0.0, "weight of the penalty on the squared log of the softmax's sum")
    logit_soft_cap: float = amount(0.0, "cap logits to c * tanh(logit / c); 0 = no cap")
    logit_tiles: int = option(1, "parts of the tokens whose logits come one by one", minimum=1)
    mlp_activation: str = option(
        "silu", "activation of the MLP's gate", choices=("silu", "gelu_tanh", "quick_gelu")
    )
    mlp_limit: float = amount(0.0, "most that the gate may be, and up's magnitude; 0 = no limit")
    mlp_up_offset: float = option(0.0, "number added to up, before the gate multiplies it")
    mlp_bias: bool = option(False, "add biases to the projections of the MLP, or of each expert")
    attention_kind: str = option(
        "gqa",
        "gqa = grouped queries; mla = latent attention, see model.mla",
        choices=("gqa", "mla"),
    )
    qk_norm: bool = option(False, "RMS-normalise queries and keys", needs=_GROUPED)
    qk_norm_scope: str = option(
        "head", "normalise each head, or all", choices=("head", "full"), acts_with="model.qk_norm"
    )
    attention_bias: bool = option(False, "biases of queries, keys and values", needs=_GROUPED)
    attention_output_bias: bool = option(False, "bias of the output projection", needs=_GROUPED)
    attention_sinks: bool = option(False, "a learned logit in the softmax's sum", needs=_GROUPED)
    attention_soft_cap: float = amount(0.0, "cap scores to c * tanh(score / c); 0 = no cap")
    query_scale: float = amount(0.0, "factor of attention scores; 0 = 1 / sqrt(head_dim)")
    attention_window: int = amount(0, "tokens that a query of a local layer sees; 0 = all")
    layer_pattern: list[str] = option(
        [],
        "kinds of consecutive layers, repeated to the last; nope = not rotated",
        choices=LAYER_KINDS,
    )
    attention: str = option("auto", "kernel; auto by backend", variants=KERNELS, also=("auto",))
    attention_block_size: int = option(512, "most tokens of a block of splash", minimum=128)
    norm_eps: float = option(1e-5, "epsilon of RMSNorm", above=0)
    norm_placement: str = option(
        "pre",
        "norms before attention and MLP, before and after, or after",
        choices=("pre", "sandwich", "post"),
    )
    norm_offset: bool = option(False, "RMSNorm multiplies by 1 + scale, with scales from 0")
    rope_theta: float = option(10000.0, "base of the rotary frequencies", above=0)
    rope_theta_local: float = amount(
        0.0, "base of local layers; 0 = rope_theta", acts_with="model.attention_window"
    )
    rope_fraction: float = option(
        1.0, "share of a head's channels that is rotated", above=0, maximum=1, needs=_GROUPED
    )
    rope_interleaved: bool = option(False, "rotate neighbouring channels, not pairs (c, c + half)")
    rotation: str = option(
        "auto",
        "how the other channel of a pair is found; auto = by device",
        choices=("auto", "slices", "product"),
    )
    gating: str = option(
        "auto",
        "fuse gate * up into the products that read it, or keep it separate and activations in"
        " pipelines row-major; auto = by device",
        choices=("auto", "fused", "separate"),
    )
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    mla: MLAConfig = field(
        default_factory=MLAConfig, metadata={"needs": "model.attention_kind=mla"}
    )
    moe: MoEConfig = field(default_factory=MoEConfig, metadata={"needs": "model.moe.experts"})
    lora: LoRAConfig = field(default_factory=LoRAConfig, metadata={"needs": "model.lora.rank"})

    @property
    def is_latent(self) -> bool:
        """Return whether keys and values are made of a latent."""
        return self.attention_kind == "mla"

    @property
    def expert_dim(self) -> int:
        """Return the hidden width of an expert."""
        return self.moe.mlp_dim or self.mlp_dim

    @property
    def stacked_layers(self) -> int:
        """Return the number of layers after the first dense ones: those a pipeline can have."""
        return self.num_layers - self.first_dense_layers

    @property
    def narrows_parameters(self) -> bool:
        """Return whether parameters are used in a narrower dtype than they are stored in."""
        return self.param_dtype == "float32" and self.dtype != "float32"

    @property
    def dense(self) -> "ModelConfig":
        """Return the model in which all layers are like the first dense ones."""
        return replace(self, moe=MoEConfig(), first_dense_layers=0)

    @property
    def base(self) -> "ModelConfig":
        """Return the model without adapters."""
        return replace(self, lora=LoRAConfig())

    @property
    def adapted(self) -> tuple[str, ...]:
        """Return the names of the projections of a layer that have an adapter."""
        if not self.lora.rank:
            return ()
        names = ATTENTION_PROJECTIONS if self.moe.experts else PROJECTIONS
        is_all = ALL_LINEAR in self.lora.targets
        return tuple(name for name in names if is_all or name in self.lora.targets)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Return the kind of each layer, one of `LAYER_KINDS`, in model order."""
        pattern = self.layer_pattern or ["local" if self.attention_window else "global"]
        return tuple(pattern[i % len(pattern)] for i in range(self.num_layers))

    @property
    def num_token_ids(self) -> int:
        """Return how many token ids exist, not counting padding of the table."""
        is_derived = self.unpadded_vocab_size == -1  # also in records of earlier versions
        return self.vocab_size if is_derived else self.unpadded_vocab_size

    @property
    def rotated_dim(self) -> int:
        """Return how many channels of a head are rotated; `head_dim` is resolved."""
        if self.is_latent:
            return self.mla.qk_rope_head_dim
        return int(self.head_dim * self.rope_fraction)
