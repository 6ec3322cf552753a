"""A collective that XLA's CPU backend lacks, written with one that it has."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str,
) -> jax.Array:
    """Compute what `jax.lax.ragged_all_to_all` documents, with one slice for each device.

    A sender's sizes that differ from its receiver's, and a slice that leaves its array, are NaN.
    """
    operands = lax.all_gather(operand, axis_name)  # [n, R, ...]
    first, sent, there = (
        lax.all_gather(a, axis_name)[:, lax.axis_index(axis_name)]  # for this device, [n]
        for a in (input_offsets, send_sizes, output_offsets)
    )
    is_sound = (sent == recv_sizes) & (first + sent <= operand.shape[0])
    is_sound &= there + sent <= output.shape[0]
    numbers = jnp.arange(output.shape[0])
    for source in range(operands.shape[0]):
        offset = numbers - there[source]
        is_written = (offset >= 0) & (offset < sent[source])
        rows = jnp.take(operands[source], first[source] + offset, axis=0, mode="clip")
        wrong = jnp.asarray(np.nan if jnp.issubdtype(rows.dtype, jnp.inexact) else -1, rows.dtype)
        rows = jnp.where(is_sound[source], rows, wrong)
        output = jnp.where(is_written.reshape(-1, *[1] * (output.ndim - 1)), rows, output)
    return output
