"""Name the parameters of MaxText's dense decoders, and say how each becomes one of ours.

Both have the same dimensions: [D, H, C] for queries, [H, C, D] for outputs, [D, F] for the MLP.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import jax

from maxpipe.config.errors import Problem
from maxpipe.config.sections import ModelConfig
from maxpipe.model.parameters import ParamSpec
from maxpipe.model.program import ModelProgram

Path: TypeAlias = tuple[str, ...]  # path of one of our parameters

LAYERS = "layers"
_ATTENTION = "self_attention."
_NAMES: dict[Path, str] = {
    ("embed", "embedding"): "token_embedder.embedding",
    ("head", "norm", "scale"): "decoder.decoder_norm.scale",
    ("head", "kernel"): "decoder.logits_dense.kernel",
    (LAYERS, "attention_norm", "scale"): "pre_self_attention_layer_norm.scale",
    (LAYERS, "mlp_norm", "scale"): "post_self_attention_layer_norm.scale",
    (LAYERS, "attention", "query"): f"{_ATTENTION}query.kernel",
    (LAYERS, "attention", "key"): f"{_ATTENTION}key.kernel",
    (LAYERS, "attention", "value"): f"{_ATTENTION}value.kernel",
    (LAYERS, "attention", "out"): f"{_ATTENTION}out.kernel",
    (LAYERS, "attention", "query_bias"): f"{_ATTENTION}query.bias",
    (LAYERS, "attention", "key_bias"): f"{_ATTENTION}key.bias",
    (LAYERS, "attention", "value_bias"): f"{_ATTENTION}value.bias",
    (LAYERS, "attention", "query_norm", "scale"): f"{_ATTENTION}query_norm.scale",
    (LAYERS, "attention", "key_norm", "scale"): f"{_ATTENTION}key_norm.scale",
    (LAYERS, "mlp", "gate"): "mlp.wi_0.kernel",
    (LAYERS, "mlp", "up"): "mlp.wi_1.kernel",
    (LAYERS, "mlp", "down"): "mlp.wo.kernel",
}
# The options of these MaxText blocks; with others their weights would have another meaning.
_LEGAL: dict[str, tuple[object, ...]] = {
    "norm_placement": ("pre",),
    "norm_offset": (False,),
    "query_scale": (0,),
    "embed_scale": (1,),
    "residual_scale": (1,),
    "rope_fraction": (1,),
    "mlp_activation": ("silu", "gelu_tanh"),
    "qk_norm_scope": ("head",),
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a MaxText model.

    Attributes:
      name: name in the model, or in a layer.
      shape: shape of one layer's parameter, without padding of the vocabulary.
      vocab_axis: the dimension of the vocabulary, None if there is none.
      factor: number by which the values are multiplied.
      splits_pairs: whether channels 2i and 2i + 1 of the last dimension, which MaxText rotates as a
        pair, become i and i + C/2.
    """

    name: str
    shape: tuple[int, ...]
    vocab_axis: int | None = None
    factor: float = 1.0
    splits_pairs: bool = False


def divides_scores(m: ModelConfig) -> bool:
    """Return whether the block divides scores by the root of head_dim: qwen2's and qwen3's do.

    llama2 and mistral have this factor in their query weights.
    """
    return m.attention_bias or m.qk_norm


def rotates_neighbours(m: ModelConfig) -> bool:
    """Return whether MaxText rotates pairs of neighbouring channels: with Llama 3.1's scaling."""
    return m.rope_scaling.type == "llama3" and m.rope_scaling.factor > 1


def parameters(m: ModelConfig) -> dict[Path, Parameter]:
    """Return the MaxText counterpart of each parameter of a resolved model, by its path."""
    splits_pairs = rotates_neighbours(m) and not m.rope_interleaved
    named = {}
    for path, spec in _specs(m):
        sublayer, kind = path[1:2], path[-2 if path[-1] == "scale" else -1].partition("_")[0]
        is_rotated = sublayer == ("attention",) and kind in ("query", "key")
        factor = 1.0 if divides_scores(m) or path[-1] != "query" else math.sqrt(m.head_dim)
        axis = spec.axes.index("vocab") if "vocab" in spec.axes else None
        shape = tuple(m.num_token_ids if i == axis else n for i, n in enumerate(spec.shape))
        named[path] = Parameter(_NAMES[path], shape, axis, factor, splits_pairs and is_rotated)
    return named


def model_problems(m: ModelConfig) -> list[Problem]:
    """Return a problem for each key of a resolved model that none of MaxText's blocks has."""
    problems = [
        Problem(
            f"model.{key}",
            f"must be {' or '.join(map(str, legal))} for weights of MaxText, is {getattr(m, key)}",
        )
        for key, legal in _LEGAL.items()
        if getattr(m, key) not in legal
    ]
    unnamed = [".".join(path) for path, _ in _specs(m) if path not in _NAMES]
    if unnamed and not problems:
        message = (
            f"the model has {', '.join(unnamed)}, which the weights of MaxText's blocks llama2, "
            "mistral, qwen2 and qwen3 do not have"
        )
        problems.append(Problem("model", message))
    return problems


def _specs(m: ModelConfig) -> Iterator[tuple[Path, ParamSpec]]:
    flat = jax.tree_util.tree_leaves_with_path(
        ModelProgram(m).specs, is_leaf=lambda spec: isinstance(spec, ParamSpec)
    )
    for path, spec in flat:
        yield tuple(str(key.key) for key in path), spec
