"""Split a global batch [B, T] into microbatches [M, B / M, T]."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxpipe.model.layers import SideInputs
from maxpipe.sharding.context_parallel import in_places

Batch = dict[str, jax.Array]
ARRAYS = ("tokens", "targets", "positions", "segment_ids", "weights")  # [B, T] each


def prepared(batch: Batch, context: int) -> Batch:
    """Return a global batch in the form that the layers take.

    Tokens are in the order of their places on the devices along mesh axis `context`, and
    sequence_index int32 [B] is added: the index in the global batch, from which dropout masks are
    drawn.
    """
    if context > 1:
        batch = {name: in_places(x, context) for name, x in batch.items()}
    return batch | {"sequence_index": jnp.arange(batch["tokens"].shape[0], dtype=jnp.int32)}


def specs(spec: PartitionSpec) -> dict[str, PartitionSpec]:
    return dict.fromkeys(ARRAYS, spec) | {"sequence_index": PartitionSpec(*spec[:1])}


def split(batch: Batch, num_microbatches: int) -> Batch:
    """Split [B, ...] into [M, B / M, ...].

    Microbatch m takes rows m::M, so that no row leaves its data shard.
    """

    def split_array(x: jax.Array) -> jax.Array:
        # [B, ...] -> [B / M, M, ...] -> [M, B / M, ...]
        return jnp.swapaxes(x.reshape(-1, num_microbatches, *x.shape[1:]), 0, 1)

    return {name: split_array(x) for name, x in batch.items()}


def columns(batch: Batch, num_microbatches: int) -> Batch:
    """Reshape [B, ...] to [B / M, M, ...], without a copy; `column` selects a microbatch."""
    return {name: x.reshape(-1, num_microbatches, *x.shape[1:]) for name, x in batch.items()}


def column(batch: Batch, microbatch: jax.Array) -> Batch:
    return {
        name: jax.lax.dynamic_index_in_dim(x, microbatch, axis=1, keepdims=False)
        for name, x in batch.items()
    }


def side_inputs(batch: Batch) -> SideInputs:
    """Return what layers read besides activations, from a prepared batch or its microbatches."""
    return SideInputs(batch["positions"], batch["segment_ids"], batch["sequence_index"])


def pad_rows(batch: Batch, multiple: int) -> Batch:
    """Append rows of weight 0 until `multiple` divides the number of rows."""
    missing = -batch["tokens"].shape[0] % multiple
    if not missing:
        return batch
    return {name: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for name, x in batch.items()}


def weight_sum(batch: Batch) -> jax.Array:
    """Sum the token weights of a batch, float32 scalar; at least 1e-6, to divide by."""
    return jnp.maximum(jnp.sum(batch["weights"]), 1e-6)
