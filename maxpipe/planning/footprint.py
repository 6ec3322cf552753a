"""Sizes of a decoder's tensors on one device, from shapes and the default sharding rules alone."""

import math

import numpy as np

from maxpipe.config.catalog import MATMULS, OPTIMIZERS, QKV
from maxpipe.config.rules.batches import data_shards
from maxpipe.config.sections import Config
from maxpipe.pipeline.remat import remat_policy

_NORMS_AND_ADDITIONS = (
    6  # arrays of width `embed_dim` that a layer makes beside its matrix products
)


def axis_size(config: Config, axis: str) -> int:
    """Size of a mesh axis over all slices."""
    return config.mesh.size(axis)


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def optimizer_bytes(config: Config) -> float:
    """Optimizer state per parameter."""
    return 4.0 * OPTIMIZERS[config.optimizer.name].moments


def microbatch_tokens(config: Config) -> float:
    """Tokens of a microbatch on one device."""
    rows = config.data.global_batch_size / (config.pipeline.num_microbatches * data_shards(config))
    return rows * config.data.sequence_length / axis_size(config, "context")


def layer_widths(config: Config) -> dict[str, float]:
    """Width on one device of each tensor of a layer that a rematerialisation policy can name."""
    model, tensor = config.model, axis_size(config, "tensor")
    query, key = (
        model.num_query_heads * model.head_dim / tensor,
        model.num_kv_heads * model.head_dim / tensor,
    )
    widths = {
        "query_proj": query,
        "key_proj": key,
        "value_proj": key,
        "context": query,
        "out_proj": model.embed_dim,
    }
    return widths | {
        "mlp_gate": model.mlp_dim / tensor,
        "mlp_up": model.mlp_dim / tensor,
        "mlp_down": model.embed_dim,
    }


def kept_width(config: Config) -> float:
    """Width on one device of what a layer keeps from forward to backward, beside the input of its chunk.

    Probabilities of attention are not counted: kernels for accelerators never have them all.
    """
    widths, pipeline = layer_widths(config), config.pipeline
    kept = remat_policy(pipeline)
    by_layer = not pipeline.remat_iterations and pipeline.engine != "sequential"
    if kept.everything or (by_layer and not pipeline.remat_layers):
        # Norms are float32. As wide as the gate are its activation function, two parts of that
        # one's derivative and the product with `mlp_up`.
        norms = _NORMS_AND_ADDITIONS * config.model.embed_dim * 4 / itemsize(config.model.dtype)
        return sum(widths[name] for name in MATMULS) + 4 * widths["mlp_gate"] + norms
    layer_input = config.model.embed_dim if by_layer else 0
    return layer_input + sum(widths.get(name, 0.0) for name in kept.device)


def stash_width(config: Config) -> float:
    """Width on one device of what a layer's I leaves to its W on the scheduled engine.

    That is the gradients of results of products and norms, those of a gate and what it multiplies
    being made of one, and the inputs of products as far as they are results of products that are
    computed again.
    """
    widths, pipeline = layer_widths(config), config.pipeline
    kept = remat_policy(pipeline)
    everything = kept.everything or not (pipeline.remat_iterations or pipeline.remat_layers)
    found = (*QKV, *(MATMULS if everything else kept.device))
    gradients = (
        sum(widths.values()) - widths["context"] - widths["mlp_up"] + 2 * config.model.embed_dim
    )
    return gradients + sum(width for name, width in widths.items() if name not in found)


def working_width(config: Config) -> float:
    """Width on one device of all tensors of a layer and their gradients, keys and values those of whole sequences."""
    widths = layer_widths(config)
    others = (axis_size(config, "context") - 1) * (widths["key_proj"] + widths["value_proj"])
    return 2 * (sum(widths.values()) + others + _NORMS_AND_ADDITIONS * config.model.embed_dim)


def logits_bytes(config: Config, tokens: float) -> float:
    """Logits and their gradient, float32, of the tokens that a device takes through the head at a time."""
    tile = math.ceil(tokens / config.model.logit_tiles)
    return 2 * 4.0 * tile * config.model.vocab_size / axis_size(config, "tensor")
