"""Compute experts that devices along mesh axis `expert` share: take tokens there, and results back.

Each device has tokens of its own and E / n of the experts. Both ways are exact, and drop nothing by
themselves:

    ring          every device gets the tokens of all, computes what its experts add to each, and
                  the sums over devices go back
    all_to_all    a token goes to each device that has an expert of its own, in a buffer that has a
                  place for every token

Letters: B sequences, T tokens of each, N = B T, k experts of a token, E experts, n devices along
the axis, D embed.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from maxpipe.config.sections.experts import MoEConfig
from maxpipe.model.experts.dispatch import Layout, Places, collect, spread
from maxpipe.model.experts.mixture import ExpertsFn, ExpertWeights, MultiplyFn
from maxpipe.sharding.collectives import EXPERT_AXIS, gathered, summed, swapped

KEY = "model.moe.dispatch"
SPARSE_CALL = "sparse_rows_"  # begins the name of a call that uses "a_of_b" of its rows


def choose_dispatch(moe: MoEConfig, devices: int, note: Callable[[str], None]) -> str:
    """Return the name of a way; an automatic choice is printed with its reason.

    There is more than one device along the axis; `note` prints a line.
    """
    if moe.dispatch == "auto":
        note(
            f"{KEY}=ring: over {devices} devices it moves no more than all_to_all, whose buffers "
            "have a place for every token on every device"
        )
    return "ring" if moe.dispatch == "auto" else moe.dispatch


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

    def run(
        x: jax.Array, choice: jax.Array, combine: jax.Array, weights: ExpertWeights
    ) -> jax.Array:
        per_token, width = choice.shape[-1], x.shape[-1]
        devices, num_own = lax.axis_size(EXPERT_AXIS), weights.gate.shape[0]
        tokens, flat = x.reshape(-1, width), choice.reshape(-1, per_token)
        count = tokens.shape[0]
        # 1. A place in the buffers [n, N] for each token, on each device with an expert of its own.
        places, buffer = _places(flat // num_own, devices), (devices, count)

        # 2. There, with all its experts, of which a device computes its own: [n B, T, ...].
        def there(values: jax.Array) -> jax.Array:
            received = swapped(values.reshape(*buffer, -1), EXPERT_AXIS)  # [n, N, ...]
            return received.reshape(-1, x.shape[1], values.shape[-1])

        tokens_of = places.assignments // devices
        none = num_own * devices  # an expert that no device has
        sent_choice = jnp.take(flat, tokens_of, axis=0, mode="fill", fill_value=none)
        choice_there = _own(there(sent_choice), weights)
        combine_there = there(spread(combine.reshape(-1, per_token), places))
        y = experts(there(spread(tokens, places)), choice_there, combine_there, weights)
        # 3. Back, and summed: [n B, T, D] -> [n, N, D] -> [N, n, D] -> [B, T, D].
        back = swapped(y.reshape(*buffer, width), EXPERT_AXIS)
        parts = collect(back.reshape(-1, width), places).astype(jnp.float32)
        return jnp.sum(parts, axis=1).astype(x.dtype).reshape(x.shape)

    return run


def sparse(multiply: MultiplyFn, devices: int) -> MultiplyFn:
    """Return a kernel's product in a call whose name says how many of its rows it uses on average.

    What counts FLOPs reads the name, since skipped rows cannot be seen in shapes.
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
    """Return a choice [..., k] as indices of this device's experts; others get their number."""
    count = weights.gate.shape[0]
    own = choice - lax.axis_index(EXPERT_AXIS) * count
    return jnp.where((own >= 0) & (own < count), own, count)


def _places(devices_of: jax.Array, devices: int) -> Places:
    """Give each token a row in the buffer of each device that it goes to, [n, N] rows.

    `devices_of` is the device of each of its experts, int32 [N, k].
    """
    count = devices_of.shape[0]
    goes = jnp.any(devices_of[:, :, None] == jnp.arange(devices), axis=1)  # [N, n]
    slot = jnp.cumsum(goes, axis=0, dtype=jnp.int32) - 1
    rows = jnp.where(goes, jnp.arange(devices) * count + slot, devices * count)
    # Tokens that do not go to a device have no row; the index beyond the last is dropped.
    numbers = jnp.arange(count * devices, dtype=jnp.int32)
    empty = jnp.full(devices * count, count * devices, jnp.int32)
    assignments = empty.at[rows.reshape(-1)].set(numbers, mode="drop")
    return Places(rows.astype(jnp.int32), assignments, jnp.sum(goes, axis=0, dtype=jnp.int32))
