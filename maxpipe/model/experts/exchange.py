"""Compute experts that devices along mesh axis `expert` share: send tokens there, and results back.

Each device has tokens of its own and E / n of the experts. All ways are exact, and drop nothing by
themselves:

    ring          every device gets the tokens of all, computes what its experts add to each, and
                  the sums over devices go back
    all_to_all    a token goes to each device that has one of its experts, in a buffer that has a
                  place for every token
    ragged        the same without empty places on the way, by a collective that CPUs lack

Letters: B sequences, T tokens of each, N = B T, k experts of a token, E experts, n devices along
the axis, D embed.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from maxpipe.config import ConfigError, Problem
from maxpipe.config.catalog import DISPATCHES
from maxpipe.config.sections.model_parts import MoEConfig
from maxpipe.config.terminal import Note
from maxpipe.model.experts.dispatch import Layout, Places, add_up, spread
from maxpipe.model.experts.mixture import ExpertsFn, ExpertWeights, MultiplyFn
from maxpipe.sharding.collectives import (
    EXPERT_AXIS,
    delivered,
    gathered,
    routes,
    summed,
    swapped,
)

KEY = "model.moe.dispatch"
SPARSE_CALL = "sparse_rows_"  # begins the name of a call, before "a_of_b": it uses a of b rows


def choose_dispatch(moe: MoEConfig, devices: int, platform: str, note: Note) -> str:
    """Return the name of one of these ways; an automatic choice is printed with its reason.

    Args:
      moe: options of the model's experts.
      devices: n, more than one.
      platform: platform of the devices, as JAX names it.
      note: function that prints a line.

    Raises:
      ConfigError: the configured way needs a collective that the platform lacks.
    """
    if moe.dispatch == "auto":
        reason = (
            f"over {devices} devices it moves no more than all_to_all, whose buffers have a place "
            "for every token on every device"
        )
        if platform == "tpu":
            reason += "; predicted for v5p, the others take longer to sort rows than they save"
        note(f"{KEY}=ring: {reason}")
        return "ring"
    platforms = DISPATCHES[moe.dispatch].platforms
    if platform not in platforms:
        message = (
            f"{moe.dispatch} needs a collective of {' and '.join(platforms)}, which {platform} "
            "lacks; use ring or all_to_all"
        )
        raise ConfigError(Problem(KEY, message))
    return moe.dispatch


def ring(experts: ExpertsFn) -> ExpertsFn:
    """Return `experts` for tokens of all devices, in a program that is manual over the axis."""

    def run(
        x: jax.Array, choice: jax.Array, combine: jax.Array, weights: ExpertWeights
    ) -> jax.Array:
        # [B, T, ...] -> [n B, T, ...] -> [B, T, D]
        choice = _own(lax.all_gather(choice, EXPERT_AXIS, axis=0, tiled=True), weights)
        x, combine = (gathered(values, EXPERT_AXIS, 0) for values in (x, combine))
        return summed(experts(x, choice, combine, weights), EXPERT_AXIS, 0)

    return run


def all_to_all(experts: ExpertsFn) -> ExpertsFn:
    """Return `experts` for tokens of all devices, in a program that is manual over the axis."""
    return _sent(experts, _buffers)


def ragged(experts: ExpertsFn) -> ExpertsFn:
    """Return `experts` for tokens of all devices, in a program that is manual over the axis."""
    return _sent(experts, _packed_rows)


class Transport(NamedTuple):
    """How a device's tokens travel to the devices of their experts.

    Attributes:
      places: places of each token's rows, one for each device [N, n], among R.
      there: function that sends rows [R, ...] and returns those received, [n N, ...], or zeros.
      back: function that sends rows [n N, ...] back where they came from, [R, ...].
    """

    places: Places
    there: Callable[[jax.Array], jax.Array]
    back: Callable[[jax.Array], jax.Array]


def _sent(experts: ExpertsFn, transport_for: Callable[[jax.Array, int], Transport]) -> ExpertsFn:
    """Return `experts` for tokens that are sent to each device that has one of their experts."""

    def run(
        x: jax.Array, choice: jax.Array, combine: jax.Array, weights: ExpertWeights
    ) -> jax.Array:
        per_token, width = choice.shape[-1], x.shape[-1]
        devices, num_own = lax.axis_size(EXPERT_AXIS), weights.gate.shape[0]
        tokens, flat = x.reshape(-1, width), choice.reshape(-1, per_token)
        # 1. A row for each token and device that it goes to: [R].
        places, there, back = transport_for(flat // num_own, devices)
        # 2. Send it there with the numbers of all its experts; a device computes its own.
        tokens_of = places.assignments // devices
        # Rows without a token get expert -1, which no device has; so do the zeros of empty places.
        sent_choice = 1 + jnp.take(flat, tokens_of, axis=0, mode="fill", fill_value=-1)
        choice_there = _own(there(sent_choice) - 1, weights)
        combine_there = there(spread(combine.reshape(-1, per_token), places))
        x_there = there(spread(tokens, places))
        x_there, choice_there, combine_there = (
            a.reshape(-1, x.shape[1], a.shape[-1])  # [n N, ...] -> [n B, T, ...]
            for a in (x_there, choice_there, combine_there)
        )
        y = experts(x_there, choice_there, combine_there, weights)
        # 3. Back, and summed: [n B, T, D] -> [R, D] -> [N, D] -> [B, T, D].
        return add_up(back(y.reshape(-1, width)), places).reshape(x.shape)

    return run


def _buffers(devices_of: jax.Array, devices: int) -> Transport:
    """Return the transport by buffers with a place for every token on every device."""
    count = devices_of.shape[0]

    def swap(rows: jax.Array) -> jax.Array:
        buffers = rows.reshape(devices, count, -1)  # [n N, W] -> [n, N, W]
        return swapped(buffers, EXPERT_AXIS).reshape(rows.shape)

    return Transport(_places(devices_of, devices), swap, swap)


def _packed_rows(devices_of: jax.Array, devices: int) -> Transport:
    """Return the transport of rows without gaps, in the order of devices."""
    places = _places(devices_of, devices, is_packed=True)
    out, home = routes(places.sizes, EXPERT_AXIS)
    num_sent, num_received = places.assignments.size, devices * devices_of.shape[0]
    return Transport(
        places,
        lambda rows: delivered(rows, out, home, num_received, EXPERT_AXIS),
        lambda rows: delivered(rows, home, out, num_sent, EXPERT_AXIS),
    )


def sparse(multiply: MultiplyFn, devices: int) -> MultiplyFn:
    """Return a kernel's product in a call whose name says how many of its rows it uses on average.

    The count of FLOPs reads the name, since shapes do not show skipped rows.
    """

    def run(rows: jax.Array, weights: jax.Array, places: Places, layout: Layout) -> jax.Array:
        def product(rows: jax.Array, weights: jax.Array, places: Places) -> jax.Array:
            return multiply(rows, weights, places, layout)

        # `places` has the assignments of the tokens of all devices.
        used = min(places.rows.size // devices, layout.num_rows)
        product.__name__ = f"{SPARSE_CALL}{used}_of_{layout.num_rows}"
        result: jax.Array = jax.jit(product)(rows, weights, places)
        return result

    return run


def _own(choice: jax.Array, weights: ExpertWeights) -> jax.Array:
    """Return a choice [..., k] as indices of this device's experts, with E / n for others."""
    count = weights.gate.shape[0]
    own = choice - lax.axis_index(EXPERT_AXIS) * count
    return jnp.where((own >= 0) & (own < count), own, count)


def _places(devices_of: jax.Array, devices: int, *, is_packed: bool = False) -> Places:
    """Give each token a row in the buffer of each device that it goes to.

    Args:
      devices_of: device of each of a token's experts, int32 [N, k].
      devices: n.
      is_packed: whether rows have no gaps, R = N min(k, n) of them; otherwise each device has N.
    """
    count, per_token = devices_of.shape
    num_rows = count * (min(per_token, devices) if is_packed else devices)
    goes = jnp.any(devices_of[:, :, None] == jnp.arange(devices), axis=1)  # [N, n]
    sizes = jnp.sum(goes, axis=0, dtype=jnp.int32)
    first = jnp.cumsum(sizes) - sizes if is_packed else jnp.arange(devices) * count
    slot = jnp.cumsum(goes, axis=0, dtype=jnp.int32) - 1
    # Tokens that do not go to a device have no row; the index beyond the last is dropped.
    rows = jnp.where(goes, first + slot, num_rows)
    numbers = jnp.arange(count * devices, dtype=jnp.int32)
    empty = jnp.full(num_rows, count * devices, jnp.int32)
    assignments = empty.at[rows.reshape(-1)].set(numbers, mode="drop")
    return Places(rows.astype(jnp.int32), assignments, sizes)
