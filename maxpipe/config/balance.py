"""Cutting layers into chunks of equal cost, the head counted.

Costs are FLOPs of the model in closed form; the embedding, a lookup, has none. What XLA's cost analysis of a compiled
layer adds to them, norms and softmax, is below a per cent at real widths.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from maxpipe.config.sections import ModelConfig


def layer_matmul_parameters(model: ModelConfig) -> int:
    """Weights of one block's query, key, value and output projections and of its gated MLP.

    Args:
      model: resolved: `head_dim` is not -1.
    """
    assert model.head_dim > 0, "head_dim is not resolved"
    attention = 2 * (model.num_query_heads + model.num_kv_heads) * model.head_dim * model.embed_dim
    return attention + 3 * model.embed_dim * model.mlp_dim


def layer_costs(model: ModelConfig, sequence_length: int, *, recomputes: bool) -> list[float]:
    """Training FLOPs per token of each layer, as a multiple of those of the head.

    Args:
      model: resolved.
      sequence_length: tokens per sequence; a causal query sees half of them.
      recomputes: whether the backward computes a layer's forward again.
    """
    attention = model.num_query_heads * model.head_dim * sequence_length
    passes = 4 if recomputes else 3
    layer = passes * (layer_matmul_parameters(model) + attention) / (3 * model.vocab_size * model.embed_dim)
    return [layer] * model.num_layers


def balanced(costs: Sequence[float], num_chunks: int, *, last: float = 0.0) -> list[int]:
    """Layers of each chunk such that the most costly chunk costs least, and the others differ little.

    Of splits that are equal in that, the one with more layers in front: its pipeline is full a little earlier.

    Args:
      costs: of the layers, in model order; no fewer than chunks.
      num_chunks: how many consecutive chunks of at least one layer to make.
      last: cost of the last chunk beside its layers, which is the head's.
    """
    assert 1 <= num_chunks <= len(costs)
    until = [0.0, *accumulate(costs)]

    def cost(chunk: int, begin: int, end: int) -> float:
        return until[end] - until[begin] + (last if chunk == num_chunks - 1 else 0.0)

    @cache
    def worst(chunk: int, begin: int) -> float:
        """Cost of the most costly of the chunks from `chunk` on, which hold the layers from `begin` on."""
        if chunk == num_chunks - 1:
            return cost(chunk, begin, len(costs))
        ends = range(begin + 1, len(costs) - (num_chunks - 1 - chunk) + 1)
        return min(max(cost(chunk, begin, end), worst(chunk + 1, end)) for end in ends)

    limit = worst(0, 0) * (1 + 1e-9)

    @cache
    def spread(chunk: int, begin: int) -> tuple[float, tuple[int, ...]]:
        """(sum of squared costs, minus ends) of the chunks from `chunk` on; infinite where one exceeds the limit."""
        if chunk == num_chunks - 1:
            alone = cost(chunk, begin, len(costs))
            return (square(alone) if alone <= limit else float("inf")), (-len(costs),)
        choices = []
        for end in range(begin + 1, len(costs) - (num_chunks - 1 - chunk) + 1):
            mine = cost(chunk, begin, end)
            rest, ends = spread(chunk + 1, end) if mine <= limit else (float("inf"), ())
            choices.append((round(square(mine) + rest, 9), (-end, *ends)))
        return min(choices)

    def square(cost: float) -> float:
        return (cost / limit) ** 2

    ends = [-end for end in spread(0, 0)[1]]
    return [end - begin for begin, end in zip((0, *ends), ends, strict=False)]
