"""Circular iterations on weights that are gathered once per repeat, or once for all repeats.

Autodiff of a loop whose weights are gathered inside it gathers them, and reduces their gradients,
in every iteration. Here forward and backward are written out, in a program that is manual over the
batch axes, so that each device adds up the gradient of its own rows in float32 and a repeat's
gradient is reduced and scattered once.

In breadth-first order all stages are in repeat r or r - 1 during the d(S-1) iterations [rM, rM +
d(S-1)), the `switch` into r, and all are in r during the following M - d(S-1). So two sets of
gathered weights suffice: after the switch the previous one is dead and the next is fetched while
the stages compute. With M = dS only d iterations are left for that, too few to hide a fetch; then
it is done a repeat earlier, and there are three sets. The backward goes the same way in reverse,
beside one or two sets of gradients.

From forward to backward wait each iteration's residuals that depend on activations, as the remat
policy says, and no weights. Letters: S stages, V repeats, L layers per stage, M microbatches, d
forwarding delay, K = M / S.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from maxpipe.model.parameters import Params
from maxpipe.pipeline.engines.circular.conveyor import Conveyor, State
from maxpipe.pipeline.engines.scheduled.split_vjp import SplitVjp
from maxpipe.pipeline.manual import BATCH_AXES, map_gathers, sum_replicas

Carry = Any
# (x [S,B,T,D], weights of the stages [S, L, ...], everything without a gradient) -> (y, auxiliary
# losses [S])
Stages = Callable[[jax.Array, Params, Any], tuple[jax.Array, jax.Array]]
SET = ("stage", None)  # mesh axes of the leading dimensions [S, L] of a set


class Sharding(NamedTuple):
    """PartitionSpecs over the batch axes.

    Attributes:
      layers: tree of those of live layer parameters [V, S, L, ...].
      io: of the conveyor [S, K, B, T, D].
      side: tree of those of side inputs [M, B, ...].
    """

    layers: Any
    io: PartitionSpec
    side: Any


class RepeatGather:
    """All iterations: `run(layers, io, side, key_data)` -> (outputs in the conveyor, auxiliary loss sum).

    Args:
      stages: the stages' work.
      rest: (t, side inputs [M, ...], key data) -> what `stages` takes beside activations and
        weights in iteration t.
      conveyor: the iterations.
      gathers: a `Gather` for every parameter of a layer.
      sharding: of the arguments over the batch axes.
      mesh: the device mesh.
      once: gather all repeats before the first iteration.
      scan_iterations, scan_repeats: loops, or copies of their bodies.
    """

    def __init__(
        self,
        stages: Stages,
        rest: Callable[[Any, Any, Any], Any],
        conveyor: Conveyor,
        gathers: Any,
        sharding: Sharding,
        mesh: jax.sharding.Mesh,
        *,
        once: bool,
        scan_iterations: bool = True,
        scan_repeats: bool = True,
    ):
        self._stages, self._rest, self._conveyor, self._gathers = stages, rest, conveyor, gathers
        self._sharding, self._mesh = sharding, mesh
        self._once, self._scan_iterations, self._scan_repeats = once, scan_iterations, scan_repeats
        self.run = jax.custom_vjp(self._run)
        self.run.defvjp(self._run_and_keep, self._run_back)

    @property
    def _lookahead(self) -> int:
        """How many repeats ahead weights are fetched; what is there already needs no time."""
        c = self._conveyor
        return 2 if c.num_microbatches == c.delay * c.num_stages and not self._once else 1

    def _manual(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(
            f,
            mesh=self._mesh,
            axis_names=set(BATCH_AXES),
            check_vma=False,
            in_specs=in_specs,
            out_specs=out_specs,
        )

    def _run(
        self, layers: Params, io: jax.Array, side: Any, key_data: Any
    ) -> tuple[jax.Array, jax.Array]:
        layer, io_spec, side_spec = self._sharding

        def forward(layers: Params, io: jax.Array, side: Any, key_data: Any) -> Any:
            state, _ = _Pass(self, layers, side, key_data).forward(io, keep=False)
            return self._conveyor.outputs(state), state.aux[None]

        specs = (layer, io_spec, side_spec, PartitionSpec())
        io, aux = self._manual(forward, specs, (io_spec, PartitionSpec(BATCH_AXES)))(
            layers, io, side, key_data
        )
        return io, jnp.sum(aux)

    def _run_and_keep(self, layers: Params, io: jax.Array, side: Any, key_data: Any) -> Any:
        layer, io_spec, side_spec = self._sharding
        parts = PartitionSpec(BATCH_AXES)

        def forward(layers: Params, io: jax.Array, side: Any, key_data: Any) -> Any:
            state, kept = _Pass(self, layers, side, key_data).forward(io, keep=True)
            return self._conveyor.outputs(state), state.aux[None], kept

        specs = (layer, io_spec, side_spec, PartitionSpec())
        io, aux, kept = self._manual(forward, specs, (io_spec, parts, parts))(
            layers, io, side, key_data
        )
        return (io, jnp.sum(aux)), (layers, side, key_data, kept)

    def _run_back(self, saved: Any, cotangent: tuple[jax.Array, jax.Array]) -> Any:
        layers, side, key_data, kept = saved
        layer, io_spec, side_spec = self._sharding

        def backward(
            layers: Params, side: Any, key_data: Any, kept: Any, io: jax.Array, aux: jax.Array
        ) -> Any:
            gradients, io = _Pass(self, layers, side, key_data).backward(kept, io, aux)
            gradients = sum_replicas(self._gathers, gradients, BATCH_AXES)
            return jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, layers), io

        whole = PartitionSpec()
        specs = (layer, side_spec, whole, PartitionSpec(BATCH_AXES), io_spec, whole)
        gradients, io = self._manual(backward, specs, (layer, io_spec))(
            layers, side, key_data, kept, *cotangent
        )
        return gradients, io, None, None


class _Pass:
    """One forward or backward pass, inside the manual program: arrays are this device's parts."""

    def __init__(self, of: RepeatGather, layers: Params, side: Any, key_data: Any):
        self._of, self._conveyor = of, of._conveyor
        self._side, self._key_data = side, key_data
        self._shards = layers
        # More rows than repeats belong to layers outside the pipeline, which pass by here.
        self._rows = jax.tree.leaves(layers)[0].shape[0]
        if of._once:
            V = self._conveyor.num_repeats
            self._shards = map_gathers(
                lambda g, p: g.gather(p[:V], leading=(None, *SET)), of._gathers, layers
            )

    def forward(self, io: jax.Array, *, keep: bool) -> tuple[State, list[jax.Array]]:
        """(the state after the last iteration, what each iteration keeps [iterations, ...])."""
        c = self._conveyor
        state = c.first_state(io)
        split = self._split(io) if keep else None
        like = split.residuals if split else []
        kept = [_store(c.num_iterations, k) for k in like]
        M, V, fill = c.num_microbatches, c.num_repeats, c.fill_iterations

        def span(
            carry: Carry, start: Any, length: int, here: Params, there: Params | None = None
        ) -> Carry:
            return self._forward_span(split, carry, start, length, here, there)

        def first(carry: Carry, here: Params) -> Carry:
            return span(carry, 0, fill, here)

        def body(carry: Carry, r: Any, here: Params, there: Params) -> Carry:
            carry = span(carry, r * M + fill, M - fill, here)
            return span(carry, (r + 1) * M, fill, here, there)

        carry, last = self._slide(lambda i: i, first, body, (state, kept))
        state, kept = span(carry, (V - 1) * M + fill, M, last)
        return state, kept

    def backward(
        self, kept: list[jax.Array], io: jax.Array, aux: jax.Array
    ) -> tuple[Params, jax.Array]:
        """Gradients of the layers' shards, float32, and of the conveyor, from those of `forward`'s results."""
        c = self._conveyor
        M, V, fill = c.num_microbatches, c.num_repeats, c.fill_iterations
        split = self._split(io)
        finish = lambda state: (c.outputs(state), state.aux)  # noqa: E731
        state = _pull(finish, jax.eval_shape(c.first_state, io), (io, aux))
        totals = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), self._shards)

        def span(
            carry: Carry, start: Any, length: int, here: Params, before: Params | None = None
        ) -> Carry:
            return self._backward_span(split, kept, carry, start, length, here, before)

        def first(carry: Carry, here: Params) -> Carry:
            state, totals = carry
            state, sums, _ = span((state, _zeros(here), None), V * M, fill, here)
            return state, sums, totals

        def body(carry: Carry, i: Any, here: Params, before: Params) -> Carry:
            state, sums, totals = carry
            r = V - 1 - i
            state, sums, _ = span((state, sums, None), r * M + fill, M - fill, here)
            state, sums, earlier = span((state, sums, _zeros(before)), r * M, fill, here, before)
            return state, earlier, self._put(totals, r, sums)

        (state, sums, totals), last = self._slide(lambda i: V - 1 - i, first, body, (state, totals))
        state, sums, _ = span((state, sums, None), 0, M, last)
        totals = self._put(totals, 0, sums)
        if self._of._once:
            totals = map_gathers(
                lambda g, x: g.scatter(x, leading=(None, *SET)), self._of._gathers, totals
            )
            totals = jax.tree.map(
                lambda x: jnp.pad(x, [(0, self._rows - V)] + [(0, 0)] * (x.ndim - 1)), totals
            )
        return totals, _pull(c.first_state, jax.ShapeDtypeStruct(io.shape, io.dtype), state)

    def _slide(
        self,
        repeat: Callable[[Any], Any],
        first: Callable[[Carry, Params], Carry],
        body: Callable[[Carry, Any, Params, Params], Carry],
        carry: Carry,
    ) -> tuple[Carry, Params]:
        """Goes through neighbouring repeats with their weights, fetched ahead.

        Args:
          repeat: position in the order of visits -> repeat.
          first: called with the first repeat's weights.
          body: called for i = 0 ... V - 2 with the weights at positions i and i + 1.
          carry: what they hand on.

        Returns:
          (carry, weights of the last repeat).
        """
        V, ahead = self._conveyor.num_repeats, self._of._lookahead
        # After the carry, or the backward's first set would be the forward's last one, kept all the
        # way.
        window = tuple(self._fetch(repeat(i), carry[0]) for i in range(min(ahead, V)))
        carry = first(carry, window[0])

        def step(state: Any, i: Any, fetches: bool = True) -> Any:
            carry, window = state
            if fetches:
                window = (*window, self._fetch(repeat(i + ahead), carry[0]))
            return body(carry, i, window[0], window[1]), window[1:]

        state = _loop(step, (carry, window), 0, max(V - ahead, 0), scan=self._of._scan_repeats)
        for i in range(max(V - ahead, 0), V - 1):
            state = step(state, i, fetches=False)
        carry, window = state
        return carry, window[0]

    def _fetch(self, repeat: Any, after: State | None) -> Params:
        """A set [S, L, ...] of gathered weights, not before `after` is there."""
        shards = (
            self._shards if after is None else lax.optimization_barrier((self._shards, after))[0]
        )
        one = jax.tree.map(lambda p: lax.dynamic_index_in_dim(p, repeat, keepdims=False), shards)
        if self._of._once:
            return one
        return map_gathers(lambda g, p: g.gather(p, leading=SET), self._of._gathers, one)

    def _put(self, totals: Params, repeat: Any, sums: Params) -> Params:
        """Stores a repeat's gradients: reduced and scattered, or as they are if that is done once for all."""
        if not self._of._once:
            sums = map_gathers(lambda g, x: g.scatter(x, leading=SET), self._of._gathers, sums)
        return jax.tree.map(
            lambda t, x: lax.dynamic_update_index_in_dim(t, x, repeat, 0), totals, sums
        )

    def _forward_span(
        self,
        split: SplitVjp | None,
        carry: Carry,
        start: Any,
        length: int,
        here: Params,
        there: Params | None,
    ) -> Carry:
        """Iterations start ... start + length - 1, the stages in `here`, or changing from `here` to `there`."""

        def iteration(carry: Carry, t: Any) -> Carry:
            state, kept, weights = carry
            weights = weights if there is None else self._where_past(t, start, there, weights)
            x, rest = self._conveyor.take(state, t), self._of._rest(t, self._side, self._key_data)
            if split is None:
                y, aux = self._of._stages(x, weights, rest)
            else:
                (y, aux), new = split.forward(x, weights, rest)
                kept = [
                    lax.dynamic_update_index_in_dim(store, k, t, 0)
                    for store, k in zip(kept, new, strict=True)
                ]
            return self._conveyor.give(state, y, aux, t), kept, weights

        # The weights are handed on so that a change overwrites them instead of making a third set.
        return _loop(iteration, (*carry, here), start, length, scan=self._of._scan_iterations)[:2]

    def _backward_span(
        self,
        split: SplitVjp,
        kept: list[jax.Array],
        carry: Carry,
        start: Any,
        length: int,
        here: Params,
        before: Params | None,
    ) -> Carry:
        """The same backwards; carry: gradients (of the state, sums for `here`, sums for `before` or None)."""
        c = self._conveyor

        def iteration(carry: Carry, i: Any) -> Carry:
            state, sums, earlier, weights = carry
            t = start + (length - 1) - i
            weights = weights if before is None else self._where_past(t, start, weights, before)
            rest = self._of._rest(t, self._side, self._key_data)
            x = jax.eval_shape(lambda s: c.take(s, t), state)
            outputs = jax.eval_shape(self._of._stages, x, weights, rest)
            state, dy, daux = _pull_all(
                lambda s, y, aux: c.give(s, y, aux, t), (state, *outputs), state
            )
            saved = [lax.dynamic_index_in_dim(store, t, keepdims=False) for store in kept]
            dx, dw = split.backward(saved, weights, rest, (dy, daux))
            state = jax.tree.map(jnp.add, state, _pull(lambda s: c.take(s, t), state, dx))
            if before is None:
                return state, jax.tree.map(_add, sums, dw), None, weights
            nothing = jax.tree.map(jnp.zeros_like, dw)
            sums = jax.tree.map(_add, sums, self._where_past(t, start, dw, nothing))
            earlier = jax.tree.map(_add, earlier, self._where_past(t, start, nothing, dw))
            return state, sums, earlier, weights

        return _loop(iteration, (*carry, here), 0, length, scan=self._of._scan_iterations)[:3]

    def _where_past(self, t: Any, switch: Any, new: Params, old: Params) -> Params:
        """`new` for the stages that are past the switch in iteration t, `old` for the others."""
        c = self._conveyor
        past = c.delay * jnp.arange(c.num_stages) <= t - switch

        def one(n: jax.Array, o: jax.Array) -> jax.Array:
            return jnp.where(past.reshape(-1, *[1] * (n.ndim - 1)), n, o)

        return jax.tree.map(one, new, old)

    def _split(self, io: jax.Array) -> SplitVjp:
        weights = jax.eval_shape(lambda: self._fetch(0, None))
        rest = jax.eval_shape(
            lambda side, key: self._of._rest(0, side, key), self._side, self._key_data
        )
        x = jax.ShapeDtypeStruct((io.shape[0], *io.shape[2:]), io.dtype)
        return SplitVjp(self._of._stages, x, weights, rest)


def _loop(
    step: Callable[[Carry, Any], Carry], carry: Carry, start: Any, length: int, *, scan: bool
) -> Carry:
    """`step` for start, start + 1, ...: in a loop or written out."""
    if length and scan:
        return lax.scan(lambda carry, i: (step(carry, i), None), carry, start + jnp.arange(length))[
            0
        ]
    for i in range(length):
        carry = step(carry, start + i)
    return carry


def _pull(f: Callable[[Any], Any], like: Any, cotangent: Any) -> Any:
    """Transpose of an affine function of one pytree."""
    return _pull_all(f, (like,), cotangent)[0]


def _pull_all(f: Callable[..., Any], like: tuple[Any, ...], cotangent: Any) -> tuple[Any, ...]:
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)
    return jax.vjp(f, *zeros)[1](cotangent)


def _store(slots: int, like: Any) -> jax.Array:
    """Zeros [slots, ...], in the memory in which `like` waits."""
    zeros = jnp.zeros((slots, *like.shape), like.dtype)
    on_host = like.memory_space == jax.memory.Space.Host
    return jax.device_put(zeros, jax.memory.Space.Host) if on_host else zeros


def _zeros(weights: Params) -> Params:
    return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)


def _add(total: jax.Array, g: jax.Array) -> jax.Array:
    return total + g.astype(total.dtype)
