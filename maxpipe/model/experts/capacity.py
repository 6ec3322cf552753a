"""Bound the tokens that an expert takes, and with them the rows that devices have places for.

Without a capacity there are rows for every choice: on one of n devices that share experts, up to n
times as many as with an even one. With `model.moe.capacity_factor` an expert takes a bounded number
of each sequence's tokens, the earlier ones first; the others go without it. That depends only on
the sequence, so neither microbatches nor devices change what is dropped, and no token depends on
later ones.

Letters: B sequences, T tokens of each, k experts of a token, E experts.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxpipe.config.sections.model_parts import MoEConfig
from maxpipe.model.experts.dispatch import Layout

# (shape (B, T, k) of the choice of all devices' sequences, experts of this device) -> layout
LayoutFn = Callable[[tuple[int, ...], int], Layout]
# (expected assignments, experts, largest possible number of assignments) -> layout
KernelLayout = Callable[[int, int, int], Layout]
# Assignments that one of several devices usually gets at most, as a multiple of its even share.
_USUAL = 1.5


def capacity(moe: MoEConfig, length: int) -> int:
    """Return how many tokens of a sequence of `length` one expert takes at most."""
    if not moe.capacity_factor:
        return length
    even = length * moe.per_token / moe.experts
    return min(length, math.ceil(moe.capacity_factor * even))


def within_capacity(experts: jax.Array, moe: MoEConfig) -> jax.Array:
    """Return a choice int32 [B, T, k], dropped assignments set to E, an expert that no device has.

    The earlier tokens of a sequence come first, and within one token the better choice.
    """
    if not moe.capacity_factor:
        return experts
    length = experts.shape[1]
    in_order = experts.reshape(experts.shape[0], -1)  # [B, T k]
    chosen = jax.nn.one_hot(in_order, moe.experts, dtype=jnp.int32)  # [B, T k, E]
    rank = jnp.sum(chosen * (jnp.cumsum(chosen, axis=1) - 1), axis=-1)  # [B, T k]
    kept = jnp.where(rank < capacity(moe, length), in_order, moe.experts)
    return kept.reshape(experts.shape)


def most_assignments(choice: tuple[int, ...], num_experts: int, moe: MoEConfig) -> int:
    """Return how many assignments one device can get, given the shape of all devices' choice.

    The tokens of all devices choose as many of its experts as its capacity allows.
    """
    sequences, length, per_token = choice
    most = sequences * length * min(per_token, num_experts)
    return min(most, sequences * num_experts * capacity(moe, length))


def usual_assignments(choice: tuple[int, ...], devices: int) -> int:
    return math.ceil(_USUAL * math.prod(choice) / devices)


def layout_for(
    kernel_layout: KernelLayout, moe: MoEConfig, devices: int = 1, *, usual: bool = False
) -> LayoutFn:
    """Return the layout of rows on one of several devices that share experts.

    There are rows for `most_assignments`, or for `usual_assignments` alone.
    """

    def layout(choice: tuple[int, ...], num_experts: int) -> Layout:
        most = most_assignments(choice, num_experts, moe)
        most = min(most, usual_assignments(choice, devices)) if usual else most
        has_missing = devices > 1 or moe.capacity_factor > 0
        most += has_missing  # a free row for assignments without one
        # On average a device computes its part of the assignments of all devices.
        rows = kernel_layout(min(math.prod(choice) // devices, most), num_experts, most)
        return rows._replace(missing="last" if has_missing else "none")

    return layout
