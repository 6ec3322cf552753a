"""Multiply blocks of rows, each of one expert, in a loop: the kernel for every backend.

The rows of an expert fill whole blocks, the last with rows that weigh nothing. Rows multiplied
beyond those of tokens are at most `_WASTE` of the latter, if a block has more than `_LEAST` rows.
XLA's own `lax.ragged_dot` multiplies every row with the weights of all experts on CPUs and GPUs.

Letters: A assignments, b rows of a block, P rows of all blocks, E experts, D and F widths.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.dtypes import float0

from maxpipe.config.sections import ModelConfig
from maxpipe.model.experts.dispatch import Layout, Places, first_rows

_LEAST, _MOST = 8, 128  # rows of a block
_WASTE = 0.2


class Blocks:
    """The kernel; see `maxpipe.model.experts`."""

    @staticmethod
    def unfit(config: ModelConfig) -> str:
        """Return an empty string: the kernel serves every size."""
        return ""

    @staticmethod
    def layout(num_assignments: int, num_experts: int, most: int | None = None) -> Layout:
        """Return blocks as large as the waste allows; an expert may have one partly full block."""
        most = num_assignments if most is None else most
        groups = min(most, num_experts)
        size = _LEAST
        while 2 * size <= _MOST and 2 * size * groups <= _WASTE * num_assignments:
            size *= 2
        return Layout(size * (most // size + groups), size, most > num_assignments)

    @staticmethod
    def multiply(rows: jax.Array, weights: jax.Array, places: Places, layout: Layout) -> jax.Array:
        """Return rows [P, D] times the weights [E, D, F] of their experts, [P, F]."""
        first = first_rows(places.sizes, layout.alignment)
        blocks = jnp.arange(layout.num_rows // layout.alignment, dtype=jnp.int32)
        # A block's expert is the last that begins at or before its first row; empty experts begin
        # there too, but precede it. Blocks after all rows are the last expert's.
        starts = blocks * layout.alignment
        ends = first + -(-places.sizes // layout.alignment) * layout.alignment
        experts = jnp.searchsorted(ends, starts, side="right").astype(jnp.int32)
        if not layout.is_sparse:
            experts = jnp.minimum(experts, weights.shape[0] - 1)
        return _multiply(rows, weights, experts, layout.is_sparse)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _multiply(
    rows: jax.Array, weights: jax.Array, experts: jax.Array, is_sparse: bool
) -> jax.Array:
    """Multiply rows [P, D] with weights [E, D, F].

    Args:
      rows, weights: the operands.
      experts: int32 [P / b], expert of each block; E for blocks without assignments if `is_sparse`.
      is_sparse: whether such blocks are skipped.
    """
    return _over_blocks(rows, weights, experts, is_sparse, contracted=0)


def _over_blocks(
    rows: jax.Array, weights: jax.Array, experts: jax.Array, is_sparse: bool, *, contracted: int
) -> jax.Array:
    """Multiply each block with its expert's matrix, summing over a dimension of the matrix."""

    def products(rows: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
        def multiply(block: tuple[jax.Array, jax.Array]) -> jax.Array:
            rows, expert = block
            matrix = lax.dynamic_index_in_dim(weights, expert, keepdims=False)
            return lax.dot_general(rows, matrix, (((1,), (contracted,)), ((), ())))

        def multiply_or_skip(block: tuple[jax.Array, jax.Array]) -> jax.Array:
            shape = block[0].shape[0], weights.shape[2 - contracted]
            is_used = block[1] < weights.shape[0]
            return lax.cond(is_used, multiply, lambda _: jnp.zeros(shape, rows.dtype), block)

        blocks = rows.reshape(experts.shape[0], -1, rows.shape[1])  # [P / b, b, D]
        product = lax.map(multiply_or_skip if is_sparse else multiply, (blocks, experts))
        return product.reshape(rows.shape[0], -1)

    return _if_sparse(products, is_sparse)(rows, weights, experts)


def _if_sparse(f: Callable[..., jax.Array], is_sparse: bool) -> Callable[..., jax.Array]:
    """Return `f`, if sparse mapped over stages in a loop: vectorised conditionals skip nothing."""
    return sequential_vmap(f) if is_sparse else f


def _forward(
    rows: jax.Array, weights: jax.Array, experts: jax.Array, is_sparse: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return _multiply(rows, weights, experts, is_sparse), (rows, weights, experts)


def _backward(
    is_sparse: bool, saved: tuple[jax.Array, jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, np.ndarray]:
    rows, weights, experts = saved
    of_rows = _over_blocks(gradient, weights, experts, is_sparse, contracted=1)
    of_weights = _if_sparse(partial(_weight_gradients, is_sparse), is_sparse)(
        rows, gradient, experts, jnp.zeros(weights.shape, jnp.float32)
    )
    return of_rows, of_weights.astype(weights.dtype), np.zeros(experts.shape, float0)


def _weight_gradients(
    is_sparse: bool, rows: jax.Array, gradient: jax.Array, experts: jax.Array, zeros: jax.Array
) -> jax.Array:
    """Return gradients [E, D, F] of the weights, float32; `zeros` has their shape."""

    def add(
        total: jax.Array, block: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, None]:
        rows, gradient, expert = block
        # [b, D] x [b, F] -> [D, F], summed over an expert's blocks in float32
        product = lax.dot_general(
            rows, gradient, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        sum_so_far = lax.dynamic_index_in_dim(total, expert, keepdims=False)
        return lax.dynamic_update_index_in_dim(total, sum_so_far + product, expert, 0), None

    def add_or_skip(
        total: jax.Array, block: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, None]:
        return lax.cond(block[2] < zeros.shape[0], add, lambda t, _: (t, None), total, block)

    count = experts.shape[0]
    blocks = (
        rows.reshape(count, -1, rows.shape[1]),
        gradient.reshape(count, -1, gradient.shape[1]),
    )
    total, _ = lax.scan(add_or_skip if is_sparse else add, zeros, (*blocks, experts))
    return total


_multiply.defvjp(_forward, _backward)
