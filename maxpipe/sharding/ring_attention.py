"""Attend across the devices along mesh axis `context` by passing keys and values around a ring.

In step s a device has the keys and values of the device s places before it, attends to them, and
merges the result with earlier ones by their logsumexps (Liu et al. 2023, arXiv 2310.01889), while
the next ones arrive. Chunks are laid out as in `context_parallel`, so that all devices have the
same work in every step. The backward is written out, since autodiff of the loop would keep the keys
of all devices: it sends keys and values around again, and the sums of their gradients with them.

Letters: B sequences, P tokens on each of C devices, H query heads.
"""

import math
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from maxpipe.sharding.attention_contract import (
    PLAIN,
    Attended,
    AttentionFn,
    AttentionOptions,
    Keys,
    PartToPart,
    Queries,
)
from maxpipe.sharding.collectives import CONTEXT_AXIS

_Tree = TypeVar("_Tree")
_Sums: TypeAlias = tuple[jax.Array, jax.Array]  # of gradients of k and v, float32
_Saved: TypeAlias = tuple[Queries, Keys, Attended]


def over_ring(attention: PartToPart) -> AttentionFn:
    """Return attention of a device's own queries [B,P,H,...] to all keys, given its part of both.

    For use in a program that is manual over the axis.
    """

    @jax.custom_vjp
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return forward(q, k, v, segments)[0]

    def forward(
        q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array
    ) -> tuple[jax.Array, _Saved]:
        queries, keys = Queries(q, segments), Keys(k, v, segments)
        out, logsumexp = _forward(attention, queries, keys)
        # A policy that saves attention's output saves both, and computes nothing again.
        attended = Attended(
            checkpoint_name(out.astype(q.dtype), "context"), checkpoint_name(logsumexp, "context")
        )
        return attended.out, (queries, keys, attended)

    def backward(saved: _Saved, gradient: jax.Array) -> tuple[jax.Array | None, ...]:
        queries, keys, _ = saved
        found = zip(_backward(attention, *saved, gradient), (queries.q, *keys[:2]), strict=True)
        return *(d.astype(x.dtype) for d, x in found), None

    attend.defvjp(forward, backward)

    def run(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array,
        options: AttentionOptions = PLAIN,
    ) -> jax.Array:
        assert options == PLAIN, "see `check_context_strategy`"
        q, k, v = (x.swapaxes(1, 2) for x in (q / math.sqrt(q.shape[3]), k, v))
        out: jax.Array = attend(q, k, v, segment_ids)
        return out.swapaxes(1, 2)

    return run


def _forward(attention: PartToPart, queries: Queries, keys: Keys) -> Attended:
    def step(
        carry: tuple[Keys, Attended], is_earlier: jax.Array
    ) -> tuple[tuple[Keys, Attended], None]:
        keys, (before, before_sum) = carry
        following = _passed_on(keys)
        out, logsumexp = attention.forward(queries, keys, is_earlier)
        total = jnp.logaddexp(before_sum, logsumexp)
        before_share, share = (jnp.exp(x - total)[..., None] for x in (before_sum, logsumexp))
        out = before_share * before + jnp.where(share > 0, share * out, 0)
        return (following, Attended(out, total)), None

    following = _passed_on(keys)
    out, logsumexp = attention.forward(queries, keys, None)
    own = Attended(out.astype(jnp.float32), logsumexp)
    (_, attended), _ = lax.scan(step, (following, own), _earlier_devices())
    return attended


def _backward(
    attention: PartToPart, queries: Queries, keys: Keys, attended: Attended, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of q, k and v in float32."""

    def gradients(keys: Keys, is_earlier: jax.Array | None) -> tuple[jax.Array, _Sums]:
        found = attention.backward(queries, keys, attended, gradient, is_earlier)
        dq, dk, dv = (x.astype(jnp.float32) for x in found)
        return dq, (dk, dv)

    def step(
        carry: tuple[Keys, jax.Array, _Sums], is_earlier: jax.Array
    ) -> tuple[tuple[Keys, jax.Array, _Sums], None]:
        keys, dq, sums = carry
        # The sums that this device has made are for the keys that the next one has now.
        following, (dk, dv) = _passed_on((keys, sums))
        more_q, (more_k, more_v) = gradients(keys, is_earlier)
        return (following, dq + more_q, (dk + more_k, dv + more_v)), None

    following = _passed_on(keys)
    (_, dq, sums), _ = lax.scan(step, (following, *gradients(keys, None)), _earlier_devices())
    return dq, *_passed_on(sums)


def _earlier_devices() -> jax.Array:
    """Return, for each step but the first, whether its keys are an earlier device's, [C - 1]."""
    return jnp.arange(1, lax.axis_size(CONTEXT_AXIS)) <= lax.axis_index(CONTEXT_AXIS)


def _passed_on(x: _Tree) -> _Tree:
    """Send arrays to the next device of the ring; return those of the one before."""
    size = lax.axis_size(CONTEXT_AXIS)
    ring = [(device, (device + 1) % size) for device in range(size)]
    return jax.tree.map(lambda a: lax.ppermute(a, CONTEXT_AXIS, ring), x)
