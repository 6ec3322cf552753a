"""Parameters and training FLOPs of a decoder, in closed form.

FLOPs are counted as in "PaLM: Scaling Language Modeling with Pathways" (Chowdhery et al. 2022, appendix B):
model FLOPs, those that the mathematics asks for. What a run spends beyond them, on recomputation, padding or
pipeline bubbles, is not counted, so that it lowers MFU instead of raising it.
"""

from maxpipe.config.balance import layer_matmul_parameters
from maxpipe.config.sections import ModelConfig


def parameter_count(model: ModelConfig) -> int:
    """Number of trainable parameters.

    Args:
      model: resolved: `head_dim` is not -1.
    """
    embed, head_dim = model.embed_dim, model.head_dim
    per_layer = layer_matmul_parameters(model) + 2 * embed
    if model.qk_norm:
        per_layer += 2 * head_dim
    if model.attention_bias:
        per_layer += (model.num_query_heads + 2 * model.num_kv_heads) * head_dim
    tables = 1 if model.tie_embeddings else 2
    return tables * model.vocab_size * embed + model.num_layers * per_layer + embed


def model_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Training FLOPs per token, forward and backward, averaged over a sequence.

    6 N + 6 L H D T, with N the parameters that are multiplied with activations (the output projection
    included, tied or not; the embedding lookup, norms and biases left out), L layers, H query heads of width
    D and T tokens per sequence. The second term is attention: PaLM's 12 L H D T halved, because on average a
    causal query sees T/2 keys. Packed sequences are counted as if they were one document.

    Args:
      model: resolved: `head_dim` is not -1.
      sequence_length: tokens per sequence.
    """
    weights = model.num_layers * layer_matmul_parameters(model) + model.vocab_size * model.embed_dim
    attention = model.num_layers * model.num_query_heads * model.head_dim * sequence_length
    return 6.0 * (weights + attention)
