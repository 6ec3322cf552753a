"""`model.*`: the decoder's shape and numerics."""

from dataclasses import dataclass, field

from maxpipe.config.catalog import BLOCKS, KERNELS
from maxpipe.config.sections.fields import option

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class RopeScalingConfig:
    """Llama-3 scaling of rotary frequencies; factor 1 switches it off."""

    factor: float = option(
        1.0, "how many times longer than the original context; 1 = no scaling", minimum=1
    )
    low_freq_factor: float = option(
        1.0, "wavelengths above original/low_freq_factor are scaled fully", above=0
    )
    high_freq_factor: float = option(
        4.0, "wavelengths below original/high_freq_factor are left alone", above=0
    )
    original_max_position: int = option(
        8192, "context length the frequencies were trained for", minimum=1
    )


@dataclass(frozen=True)
class ModelConfig:
    block: str = option("llama", "decoder block", variants=BLOCKS)
    num_layers: int = option(8, "decoder layers", minimum=1, maximum=2**14)
    embed_dim: int = option(256, "width of the residual stream", minimum=1)
    num_query_heads: int = option(4, "query heads", minimum=1, maximum=2**20)
    num_kv_heads: int = option(4, "key/value heads; divides num_query_heads", minimum=1)
    head_dim: int = option(
        -1, "width of a head; -1 = embed_dim / num_query_heads", minimum=1, derived=True
    )
    mlp_dim: int = option(1024, "hidden width of the gated MLP", minimum=1)
    vocab_size: int = option(
        320, "rows of the embedding table; at least the tokenizer's vocabulary", minimum=2
    )
    dtype: str = option("float32", "dtype of activations and matrix products", choices=DTYPES)
    param_dtype: str = option("float32", "dtype in which parameters are kept", choices=DTYPES)
    tie_embeddings: bool = option(False, "use the embedding table as output projection")
    dropout: float = option(0.0, "dropout rate on each sublayer's output", minimum=0, maximum=0.99)
    z_loss: float = option(0.0, "weight of the squared log-partition penalty", minimum=0)
    logit_soft_cap: float = option(0.0, "cap logits at c*tanh(x/c); 0 = no cap", minimum=0)
    logit_tiles: int = option(
        1,
        "pieces of the tokens whose logits exist one after another; divides the memory of logits",
        minimum=1,
    )
    qk_norm: bool = option(False, "RMS-normalise queries and keys per head")
    attention_bias: bool = option(False, "bias on the query, key and value projections")
    attention: str = option(
        "auto", "attention kernel; auto picks by backend", variants=KERNELS, also=("auto",)
    )
    attention_block_size: int = option(
        512, "largest block of the splash kernel, in tokens", minimum=128
    )
    norm_eps: float = option(1e-5, "epsilon of RMSNorm", above=0)
    rope_theta: float = option(10000.0, "base of the rotary frequencies", above=0)
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
