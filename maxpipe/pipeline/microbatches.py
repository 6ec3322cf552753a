"""Splitting a global batch into microbatches. Letters: B sequences, M microbatches, T tokens."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxpipe.model.layers import SideInputs
from maxpipe.sharding.context_parallel import in_places

Batch = dict[str, jax.Array]
ARRAYS = ("tokens", "targets", "positions", "segment_ids", "weights")  # [B, T] each


def prepared(batch: Batch, context: int) -> Batch:
    """A global batch as the layers take it.

    Tokens are in their places on the devices along mesh axis `context`, and sequence_index int32
    [B] is added, the index in the global batch, from which dropout masks are drawn.
    """
    if context > 1:
        batch = {name: in_places(x, context) for name, x in batch.items()}
    return batch | {"sequence_index": jnp.arange(batch["tokens"].shape[0], dtype=jnp.int32)}


def specs(spec: PartitionSpec) -> dict[str, PartitionSpec]:
    """Layouts of a prepared batch, from that of a [B, T] array."""
    return dict.fromkeys(ARRAYS, spec) | {"sequence_index": PartitionSpec(*spec[:1])}


def split(batch: Batch, num_microbatches: int) -> Batch:
    """[B, ...] -> [M, B / M, ...]; microbatch m takes rows m::M, so that no row leaves its data shard."""

    def one(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x.reshape(-1, num_microbatches, *x.shape[1:]), 0, 1)

    return {name: one(x) for name, x in batch.items()}


def columns(batch: Batch, num_microbatches: int) -> Batch:
    """[B, ...] -> [B / M, M, ...]: `split` without a copy of the batch; `column` takes a microbatch out."""
    return {name: x.reshape(-1, num_microbatches, *x.shape[1:]) for name, x in batch.items()}


def column(batch: Batch, microbatch: jax.Array) -> Batch:
    """Microbatch `microbatch` of what `columns` made, [B / M, ...]."""
    return {
        name: jax.lax.dynamic_index_in_dim(x, microbatch, axis=1, keepdims=False)
        for name, x in batch.items()
    }


def side_inputs(batch: Batch) -> SideInputs:
    """Return what every layer reads of a prepared batch, or of its microbatches, besides activations."""
    return SideInputs(batch["positions"], batch["segment_ids"], batch["sequence_index"])


def pad_rows(batch: Batch, multiple: int) -> Batch:
    """Appends rows of weight 0 until `multiple` divides the number of rows."""
    missing = -batch["tokens"].shape[0] % multiple
    if not missing:
        return batch
    return {name: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for name, x in batch.items()}


def weight_sum(batch: Batch) -> jax.Array:
    """Sum of the token weights of the global batch, at least a tiny positive number; float32 scalar."""
    return jnp.maximum(jnp.sum(batch["weights"]), 1e-6)
