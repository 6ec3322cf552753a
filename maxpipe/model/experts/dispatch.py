"""Arrange tokens as rows in the order of their experts, and sum rows into tokens again.

Each assignment of a token to an expert is a row, so nothing is dropped, however uneven the choice;
assignments to experts of other devices have no row here, and add nothing to their tokens.
Rows of an expert are neighbours; if a kernel needs it, each expert's rows begin at a multiple of a
number. The rows in between are some token's, but weigh nothing: `by_row` gives them weight 0, and
so they have no gradient. Both directions are gathers, and so are their gradients.

Letters: N tokens, k experts of a token, A = N k assignments, P rows, E experts, D embed.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.dtypes import float0

# Which assignments have no row: "none"; or some, and then either the "last" row is known to have no
# assignment, or "any" row may have one.
Missing: TypeAlias = Literal["none", "last", "any"]


class Layout(NamedTuple):
    """How rows are laid out.

    Attributes:
      num_rows: P, enough for every choice.
      alignment: number of which the first row of each expert is a multiple.
      is_sparse: whether most rows may lack an assignment, because other devices have experts too.
      missing: which assignments may be without a row.
      tile: rows that the kernel multiplies at once.
    """

    num_rows: int
    alignment: int
    is_sparse: bool = False
    missing: Missing = "any"
    tile: int = 1


class Places(NamedTuple):
    """Where each assignment's row is.

    Attributes:
      rows: int32 [N, k], row of each assignment; P or more for those without a row.
      assignments: int32 [P], assignment in each row, counted over [N, k]; A in rows without one.
      sizes: int32 [E], rows of each expert.
    """

    rows: jax.Array
    assignments: jax.Array
    sizes: jax.Array


def arrange(experts: jax.Array, num_experts: int, layout: Layout) -> Places:
    """Give each assignment a row: by expert, then by token.

    Args:
      experts: int32 [N, k], experts of each token; E for those of other devices.
      num_experts: E.
      layout: a kernel's layout, for this number of assignments.
    """
    flat = experts.reshape(-1)  # [A]
    count = flat.shape[0]
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)  # [A], assignments by expert
    sizes = jnp.zeros(num_experts, jnp.int32).at[flat].add(1)
    before = jnp.cumsum(sizes) - sizes  # [E], assignments of earlier experts
    sorted_experts = flat[order]
    rank = jnp.arange(count, dtype=jnp.int32) - before[sorted_experts]  # within the expert
    row = first_rows(sizes, layout.alignment)[sorted_experts] + rank  # [A]
    row = jnp.where(sorted_experts < num_experts, row, layout.num_rows)
    rows = jnp.zeros(count, jnp.int32).at[order].set(row)
    assignments = jnp.full(layout.num_rows, count, jnp.int32).at[row].set(order, mode="drop")
    return Places(rows.reshape(experts.shape), assignments, sizes)


def first_rows(sizes: jax.Array, alignment: int) -> jax.Array:
    """Return the first row of each expert, int32 [E], given the numbers of their rows [E]."""
    aligned = -(-sizes // alignment) * alignment
    return jnp.cumsum(aligned) - aligned


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def spread(x: jax.Array, places: Places, missing: Missing = "any") -> jax.Array:
    """Return a row for each assignment, [N, D] -> [P, D]; rows without one are the last token's.

    Args:
      x: activations of the tokens.
      places: places of the rows.
      missing: as in `Layout`.
    """
    # Zeros instead would cost TPUs a copy of all tokens.
    return jnp.take(x, places.assignments // places.rows.shape[1], axis=0, mode="clip")


def _spread_backward(
    missing: Missing, places: Places, gradient: jax.Array
) -> tuple[jax.Array, Places]:
    if missing == "last":
        # XLA fuses a mask with the sum that makes the gradient. It would not fuse an update of one
        # row, and then the sum would take twice as long.
        row = lax.broadcasted_iota(jnp.int32, gradient.shape, 0)
        gradient = jnp.where(row < gradient.shape[0] - 1, gradient, 0)
        missing = "none"
    return _sum_of_rows((gradient,), places, missing), _no_gradient(places)


spread.defvjp(lambda x, places, missing: (spread(x, places, missing), places), _spread_backward)


@jax.custom_vjp
def spread_twice(x: jax.Array, places: Places) -> tuple[jax.Array, jax.Array]:
    """Return the rows of `spread` for two products, whose gradients are summed by token at once.

    Adding up two gradients of rows [P, D] first is predicted to take TPUs five times as long. Every
    assignment has a row: masks for two gradients would take longer.
    """
    rows = spread(x, places, "none")
    return rows, rows


spread_twice.defvjp(
    lambda x, places: (spread_twice(x, places), places),
    lambda places, gradients: (_sum_of_rows(gradients, places, "none"), _no_gradient(places)),
)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def add_up(rows: jax.Array, places: Places, missing: Missing = "any") -> jax.Array:
    """Return the sum of each token's rows, [P, D] -> [N, D], computed in float32.

    Args:
      rows: rows of assignments; those without one may be undefined.
      places: places of the rows.
      missing: as in `Layout`.
    """
    return _sum_of_rows((rows,), places, missing)


def _sum_of_rows(arrays: Sequence[jax.Array], places: Places, missing: Missing) -> jax.Array:
    # XLA adds arrays on TPUs five times as fast as it sums over a dimension of one.
    taken = [_taken(rows, places.rows.T, missing) for rows in arrays]  # each k of [N, D]
    first, *others = (part for parts in taken for part in parts)
    total = first.astype(jnp.float32)
    for other in others:
        total = total + other.astype(jnp.float32)
    return total.astype(arrays[0].dtype)


def _add_up_backward(
    missing: Missing, places: Places, gradient: jax.Array
) -> tuple[jax.Array, Places]:
    return spread(gradient, places, missing), _no_gradient(places)


add_up.defvjp(
    lambda rows, places, missing: (add_up(rows, places, missing), places), _add_up_backward
)


def _taken(rows: jax.Array, indices: jax.Array, missing: Missing) -> jax.Array:
    """Return rows [P, D] in the order of `indices`; zeros for indices from P on.

    They take a row of zeros, since TPUs are slow to spread a mask of rows over columns.
    """
    if missing == "last":
        rows = rows.at[-1].set(0)
    elif missing == "any":
        rows = jnp.concatenate([rows, jnp.zeros_like(rows[:1])])
    return jnp.take(rows, indices, axis=0, mode="clip")


@jax.custom_vjp
def by_row(values: jax.Array, places: Places) -> jax.Array:
    """Return the value of each row's assignment, [N, k] -> [P]; 0 for rows without one."""
    return jnp.take(values, places.assignments, mode="fill", fill_value=0)


def _by_row_backward(places: Places, gradient: jax.Array) -> tuple[jax.Array, Places]:
    of_values = jnp.take(gradient, places.rows, mode="fill", fill_value=0)  # [P] -> [N, k]
    return of_values, _no_gradient(places)


by_row.defvjp(lambda values, places: (by_row(values, places), places), _by_row_backward)


@jax.custom_vjp
def add_bias(rows: jax.Array, bias: jax.Array, experts: jax.Array) -> jax.Array:
    """Add to each row the bias of its expert.

    The gradient of the bias is a product with a mask, which TPUs compute faster than a sum of
    scattered rows.

    Args:
      rows: [P, F].
      bias: [E, F], in the dtype of the rows.
      experts: int32 [P], expert of each row; E where there is none.
    """
    return rows + jnp.take(bias, experts, axis=0, mode="fill", fill_value=0)


def _add_bias_forward(
    rows: jax.Array, bias: jax.Array, experts: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return add_bias(rows, bias, experts), (bias, experts)


def _add_bias_backward(
    saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, np.ndarray]:
    bias, experts = saved
    count = bias.shape[0]
    of_rows = jnp.where((experts < count)[:, None], gradient, 0)  # others may be undefined
    of_bias = lax.dot_general(
        jax.nn.one_hot(experts, count, dtype=gradient.dtype),  # [P, E]
        of_rows,
        (((0,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return gradient, of_bias.astype(bias.dtype), np.zeros(experts.shape, float0)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


def _no_gradient(places: Places) -> Places:
    return jax.tree.map(lambda x: np.zeros(x.shape, float0), places)
