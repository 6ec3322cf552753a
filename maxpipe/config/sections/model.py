"""`model.*`: the decoder's shape and numerics."""

from dataclasses import dataclass, field

from maxpipe.config.catalog import BLOCKS, KERNELS
from maxpipe.config.sections.fields import option

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class RopeScalingConfig:
    """Llama-3 scaling of rotary frequencies; factor 1 switches it off."""

    factor: float = option(
        1.0,
        "factor by which the context is longer than the original one; 1 = no scaling",
        minimum=1,
    )
    low_freq_factor: float = option(
        1.0, "wavelengths above original_max_position / this are scaled by the factor", above=0
    )
    high_freq_factor: float = option(
        4.0, "wavelengths below original_max_position / this are not scaled", above=0
    )
    original_max_position: int = option(
        8192, "context length that the unscaled frequencies were trained for, in tokens", minimum=1
    )


@dataclass(frozen=True)
class ModelConfig:
    """`model.*`."""

    block: str = option("llama", "decoder block", variants=BLOCKS)
    num_layers: int = option(8, "number of decoder layers", minimum=1, maximum=2**14)
    embed_dim: int = option(256, "width of the residual stream", minimum=1)
    num_query_heads: int = option(4, "number of query heads", minimum=1, maximum=2**20)
    num_kv_heads: int = option(
        4, "number of key/value heads; must divide num_query_heads", minimum=1
    )
    head_dim: int = option(
        -1, "width of a head; -1 = embed_dim / num_query_heads", minimum=1, derived=True
    )
    mlp_dim: int = option(1024, "hidden width of the gated MLP", minimum=1)
    vocab_size: int = option(
        320,
        "rows of the embedding table; at least the size of the tokenizer's vocabulary",
        minimum=2,
    )
    dtype: str = option("float32", "dtype of activations and matrix products", choices=DTYPES)
    param_dtype: str = option("float32", "dtype in which parameters are stored", choices=DTYPES)
    tie_embeddings: bool = option(False, "use the embedding table as output projection, too")
    dropout: float = option(
        0.0, "dropout rate on the output of attention and MLP", minimum=0, maximum=0.99
    )
    z_loss: float = option(
        0.0,
        "weight of the penalty on the squared logarithm of the softmax's denominator",
        minimum=0,
    )
    logit_soft_cap: float = option(0.0, "cap logits to c * tanh(logit / c); 0 = no cap", minimum=0)
    logit_tiles: int = option(
        1,
        "number of parts into which tokens are split for the output projection and loss; "
        "only one part's logits are in memory at a time",
        minimum=1,
    )
    qk_norm: bool = option(False, "RMS-normalise the queries and keys of each head")
    attention_bias: bool = option(False, "add a bias to the query, key and value projections")
    attention: str = option(
        "auto", "attention kernel; auto picks by backend", variants=KERNELS, also=("auto",)
    )
    attention_block_size: int = option(
        512, "upper bound of the splash kernel's block size, in tokens", minimum=128
    )
    norm_eps: float = option(1e-5, "epsilon of RMSNorm", above=0)
    rope_theta: float = option(10000.0, "base of the rotary frequencies", above=0)
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
