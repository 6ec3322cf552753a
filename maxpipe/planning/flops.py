"""Parameters and training FLOPs of a decoder, in closed form.

FLOPs are counted as in "PaLM: Scaling Language Modeling with Pathways" (Chowdhery et al. 2022,
appendix B):
model FLOPs, those that the mathematics asks for. What a run spends beyond them, on recomputation,
padding or pipeline bubbles, is not counted, so that it lowers MFU instead of raising it.
"""

from maxpipe.config.sections import ModelConfig


def layer_products(model: ModelConfig) -> dict[str, int]:
    """Weights of each matrix product of a block with its parameters, by the name of what it computes.

    Args:
      model: resolved: `head_dim` is not -1.
    """
    assert model.head_dim > 0, "head_dim is not resolved"
    query, key = (
        heads * model.head_dim * model.embed_dim
        for heads in (model.num_query_heads, model.num_kv_heads)
    )
    attention = {"query_proj": query, "key_proj": key, "value_proj": key, "out_proj": query}
    return attention | dict.fromkeys(
        ("mlp_gate", "mlp_up", "mlp_down"), model.embed_dim * model.mlp_dim
    )


def layer_parameter_count(model: ModelConfig) -> int:
    """Number of trainable parameters of one layer of a resolved model."""
    count = sum(layer_products(model).values()) + 2 * model.embed_dim
    if model.qk_norm:
        count += 2 * model.head_dim
    if model.attention_bias:
        count += (model.num_query_heads + 2 * model.num_kv_heads) * model.head_dim
    return count


def parameter_count(model: ModelConfig) -> int:
    """Number of trainable parameters of a resolved model."""
    tables = 1 if model.tie_embeddings else 2
    layers = model.num_layers * layer_parameter_count(model)
    return tables * model.vocab_size * model.embed_dim + layers + model.embed_dim


def model_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Training FLOPs per token, forward and backward, averaged over a sequence.

    6 N + 6 L H D T, with N the parameters that are multiplied with activations (the output
    projection included, tied or not; the embedding lookup, norms and biases left out), L layers, H
    query heads of width D and T tokens per sequence. The second term is attention: PaLM's 12 L H D
    T halved, because on average a causal query sees T/2 keys. Packed sequences are counted as if
    they were one document.

    Args:
      model: resolved: `head_dim` is not -1.
      sequence_length: tokens per sequence.
    """
    weights = (
        model.num_layers * sum(layer_products(model).values()) + model.vocab_size * model.embed_dim
    )
    attention = model.num_layers * model.num_query_heads * model.head_dim * sequence_length
    return 6.0 * (weights + attention)
