"""Run circular iterations on weights that are gathered once per repeat, or once for all repeats.

Autodiff of a loop that gathers weights in its body gathers them, and reduces their gradients, in
every iteration. Here forward and backward are written out, in a program that is manual over the
batch axes: each device sums the gradient of its own rows in float32, and the gradient of a repeat
is reduced and scattered once.

In breadth-first order the stages are in at most two repeats at a time. With fill = d (S-1):

    fill    [0, fill)                stages start on repeat 0, one every d iterations
    steady  [r M + fill, (r+1) M)    all stages are in repeat r
    switch  [r M, r M + fill)        stages move from repeat r - 1 to r, one every d iterations
    drain   [V M, V M + fill)        stages finish repeat V - 1

Example: S=3, V=2, M=3, d=1. The repeat of each stage, and the weights that are gathered:

    t        0     1     2       3       4       5     6      7
    stage 0  0     0     0       1       1       1     -      -
    stage 1  -     0     0       0       1       1     1      -
    stage 2  -     -     0       0       0       1     1      1
    phase    fill  fill  steady  switch  switch  steady drain drain
    weights  0     0     0       0, 1    0, 1    1     1      1

So two sets of gathered weights suffice: after the switch the old one is dead, and the next one is
gathered while the stages compute. With M = d S the steady phase has only d iterations, too few to
hide a gather, which then starts a repeat earlier, and there are three sets. The backward visits the
repeats in reverse, with one or two sets of gradients as well.

For the backward each iteration keeps the residuals that depend on activations, as the remat policy
says, but no weights. Letters: see `maxpipe.pipeline`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.sharding import PartitionSpec

from maxpipe.model.layers import AuxiliaryLosses, SideInputs
from maxpipe.model.parameters import Params, with_trainable
from maxpipe.pipeline.engines.circular.conveyor import State
from maxpipe.pipeline.engines.circular.phases import (
    DeviceInputs,
    ForwardCarry,
    GradientSums,
    Index,
    Iterations,
    StageInputs,
    backward_phase,
    forward_phase,
    loop,
    transpose,
)
from maxpipe.pipeline.manual import (
    BATCH_AXES,
    Gather,
    automatic_axes,
    is_manual,
    map_gathers,
    sum_replicas,
)
from maxpipe.pipeline.split_vjp import SplitVjp

SET = ("stage", None)  # mesh axes of the leading dimensions [S, L] of a set of weights
REPLICATED = PartitionSpec()
PER_DEVICE = PartitionSpec(BATCH_AXES)  # one row, or one part of the first dimension, per device


class Saved(NamedTuple):
    """What the forward hands to the backward: its arguments, and residuals [iterations, ...]."""

    layers: Params
    side: SideInputs
    key_data: jax.Array | None
    residuals: list[jax.Array]


class BackwardCarry(NamedTuple):
    """Gradients between two repeats of the backward.

    Attributes:
      state: gradient of the loop state.
      sums: weight gradients of this repeat so far, from this device's rows, float32 [S, L, ...].
      totals: weight gradients of all repeats, float32 [V, S, L, ...] or like the shards.
    """

    state: State
    sums: Params
    totals: Params


Carry = TypeVar("Carry", ForwardCarry, BackwardCarry)

# ------------------------------------------------------------------------------------------------
# The differentiable entry
# ------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_iterations(
    iterations: Iterations,
    layers: Params,
    io: jax.Array,
    side: SideInputs,
    key_data: jax.Array | None,
) -> tuple[jax.Array, AuxiliaryLosses]:
    """Run all iterations; differentiable in `layers` and `io`.

    Args:
      layers: live layer parameters [V + E, S, L, ...].
      io: the conveyor with the inputs, [S, K, B, T, D].
      side: side inputs [M, B, ...].
      key_data: raw data of the step's PRNG key; None without dropout.

    Returns:
      (the conveyor with the outputs, auxiliary losses summed over layers and sequences).
    """
    io, aux, _ = _run_forward(iterations, layers, io, side, key_data, keep_residuals=False)
    return io, aux


def _run_and_save(
    iterations: Iterations,
    layers: Params,
    io: jax.Array,
    side: SideInputs,
    key_data: jax.Array | None,
) -> tuple[tuple[jax.Array, AuxiliaryLosses], Saved]:
    io, aux, residuals = _run_forward(iterations, layers, io, side, key_data, keep_residuals=True)
    return (io, aux), Saved(layers, side, key_data, residuals)


def _run_forward(
    iterations: Iterations,
    layers: Params,
    io: jax.Array,
    side: SideInputs,
    key_data: jax.Array | None,
    *,
    keep_residuals: bool,
) -> tuple[jax.Array, AuxiliaryLosses, list[jax.Array]]:
    def device_forward(
        layers: Params, io: jax.Array, side: SideInputs, key_data: jax.Array | None
    ) -> tuple[jax.Array, AuxiliaryLosses, list[jax.Array]]:
        inputs = _device_inputs(iterations, layers, side, key_data)
        state, residuals = _forward(iterations, inputs, io, keep_residuals=keep_residuals)
        aux = jax.tree.map(lambda a: a[None], state.aux)
        return iterations.conveyor.outputs(state), aux, residuals

    specs = iterations.specs
    in_specs = (specs.layers, specs.io, specs.side, REPLICATED)
    out_specs = (specs.io, PER_DEVICE, PER_DEVICE)
    forward = _manual(iterations, device_forward, in_specs, out_specs)
    io, aux, residuals = forward(layers, io, side, key_data)
    return io, jax.tree.map(partial(jnp.sum, axis=0), aux), residuals


def _run_backward(
    iterations: Iterations, saved: Saved, cotangents: tuple[jax.Array, AuxiliaryLosses]
) -> tuple[Params, jax.Array, None, None]:
    def device_backward(
        layers: Params,
        side: SideInputs,
        key_data: jax.Array | None,
        residuals: list[jax.Array],
        io: jax.Array,
        aux: AuxiliaryLosses,
    ) -> tuple[Params, jax.Array]:
        inputs = _device_inputs(iterations, layers, side, key_data)
        totals, io = _backward(iterations, inputs, residuals, io, aux)
        totals = sum_replicas(iterations.gathers, totals, BATCH_AXES)
        trained = iterations.trained(layers)
        return jax.tree.map(lambda g, p: g.astype(p.dtype), totals, trained), io

    specs, trained_specs = iterations.specs, iterations.trained(iterations.specs.layers)
    in_specs = (specs.layers, specs.side, REPLICATED, PER_DEVICE, specs.io, REPLICATED)
    backward = _manual(iterations, device_backward, in_specs, (trained_specs, specs.io))
    # None, for frozen weights, is a gradient of zero.
    gradients, io = backward(*saved, *cotangents)
    return gradients, io, None, None


run_iterations.defvjp(_run_and_save, _run_backward)


def _manual(
    iterations: Iterations,
    f: Callable[..., tuple[Any, ...]],
    in_specs: tuple[object, ...],
    out_specs: tuple[object, ...],
) -> Callable[..., tuple[Any, ...]]:
    """Return `f` as a program that is manual over the batch axes, on each device's part."""
    return jax.shard_map(
        f,
        mesh=iterations.mesh,
        axis_names=set(BATCH_AXES),
        check_vma=False,
        in_specs=in_specs,
        out_specs=out_specs,
    )


# ------------------------------------------------------------------------------------------------
# Inside the manual program: arrays are this device's parts
# ------------------------------------------------------------------------------------------------


def _device_inputs(
    iterations: Iterations, layers: Params, side: SideInputs, key_data: jax.Array | None
) -> DeviceInputs:
    num_rows = jax.tree.leaves(layers)[0].shape[0]
    if not iterations.gather_once:
        return DeviceInputs(layers, side, key_data, num_rows)
    num_repeats = iterations.conveyor.num_repeats

    def gather(gather: Gather, shard: jax.Array) -> jax.Array:
        # Rows from V on belong to layers outside the pipeline.
        return gather.gather(shard[:num_repeats], leading=(None, *SET))  # [V, S, L, ...]

    weights = map_gathers(gather, iterations.gathers, layers)
    return DeviceInputs(weights, side, key_data, num_rows)


def _forward(
    iterations: Iterations, inputs: DeviceInputs, io: jax.Array, *, keep_residuals: bool
) -> ForwardCarry:
    """Run all iterations in order; the residuals are an empty list unless they are kept."""
    conveyor = iterations.conveyor
    M, V, fill = conveyor.num_microbatches, conveyor.num_repeats, conveyor.fill_iterations
    state = conveyor.first_state(io, iterations.no_auxiliary())
    split = _split_stages(iterations, inputs, io) if keep_residuals else None
    residuals = [_residual_store(iterations, r) for r in split.residuals] if split else []
    phase = partial(forward_phase, iterations, inputs, split)

    # 1. Fill: the stages start on repeat 0.
    def first(weights: Params) -> ForwardCarry:
        return phase(ForwardCarry(state, residuals), 0, fill, weights)

    # 2. Steady phase of repeat r, then the switch to r + 1.
    def visit(carry: ForwardCarry, r: Index, weights: Params, next_weights: Params) -> ForwardCarry:
        carry = phase(carry, r * M + fill, M - fill, weights)
        return phase(carry, (r + 1) * M, fill, weights, next_weights)

    carry, weights = _visit_repeats(iterations, inputs, state, lambda i: i, first, visit)
    # 3. Steady phase of the last repeat, and drain.
    return phase(carry, (V - 1) * M + fill, M, weights)


def _backward(
    iterations: Iterations,
    inputs: DeviceInputs,
    residuals: list[jax.Array],
    io: jax.Array,
    aux: AuxiliaryLosses,
) -> tuple[Params, jax.Array]:
    """Run all iterations in reverse.

    Args:
      residuals: residuals of all iterations, [iterations, ...] each.
      io: cotangent of the conveyor with the outputs, [S, K, B, T, D].
      aux: cotangents of the auxiliary losses.

    Returns:
      (float32 gradients of the shards [V + E, S, L, ...], gradient of the conveyor's inputs).
    """
    conveyor, gathers = iterations.conveyor, iterations.gathers
    M, V, fill = conveyor.num_microbatches, conveyor.num_repeats, conveyor.fill_iterations
    split = _split_stages(iterations, inputs, io)
    # 1. Turn the gradient of the outputs into the gradient of the last state.
    last_state = jax.eval_shape(conveyor.first_state, io, iterations.no_auxiliary())
    (state,) = transpose(lambda s: (conveyor.outputs(s), s.aux), (last_state,), (io, aux))
    totals = _float32_zeros(iterations.trained(inputs.weights))
    phase = partial(backward_phase, iterations, inputs, split, residuals)

    # 2. Drain: the stages finish repeat V - 1.
    def first(weights: Params) -> BackwardCarry:
        start = GradientSums(state, _float32_zeros(iterations.trained(weights)), None)
        after_drain = phase(start, V * M, fill, weights)
        return BackwardCarry(after_drain.state, after_drain.sums, totals)

    # 3. Steady phase of repeat r = V - 1 - i, then the switch into it, where gradients of r - 1
    # begin. After the last gradient of r its sum is stored.
    def visit(carry: BackwardCarry, i: Index, weights: Params, earlier: Params) -> BackwardCarry:
        r = V - 1 - i
        steady = GradientSums(carry.state, carry.sums, None)
        steady = phase(steady, r * M + fill, M - fill, weights)
        switch = GradientSums(
            steady.state, steady.sums, _float32_zeros(iterations.trained(earlier))
        )
        switch = phase(switch, r * M, fill, weights, earlier)
        assert switch.earlier is not None
        totals = _store_gradient(iterations, carry.totals, r, switch.sums)
        return BackwardCarry(switch.state, switch.earlier, totals)

    carry, weights = _visit_repeats(iterations, inputs, state, lambda i: V - 1 - i, first, visit)
    # 4. Steady phase of repeat 0, and fill.
    gradients = phase(GradientSums(carry.state, carry.sums, None), 0, M, weights)
    totals = _store_gradient(iterations, carry.totals, 0, gradients.sums)
    # 5. Reduce what was not reduced repeat by repeat. Layers outside the pipeline have no gradient
    # here.
    if iterations.gather_once:
        totals = map_gathers(lambda g, x: g.scatter(x, leading=(None, *SET)), gathers, totals)
        outside = [(0, inputs.num_rows - V)]
        totals = jax.tree.map(lambda x: jnp.pad(x, outside + [(0, 0)] * (x.ndim - 1)), totals)
    # 6. Turn the gradient of the first state into the gradient of the inputs.
    io_shape = jax.ShapeDtypeStruct(io.shape, io.dtype)
    start = partial(conveyor.first_state, aux=iterations.no_auxiliary())
    (io,) = transpose(start, (io_shape,), gradients.state)
    return totals, io


def _visit_repeats(
    iterations: Iterations,
    inputs: DeviceInputs,
    state: State,
    repeat_at: Callable[[Index], Index],
    first: Callable[[Params], Carry],
    visit: Callable[[Carry, Index, Params, Params], Carry],
) -> tuple[Carry, Params]:
    """Visit pairs of neighbouring repeats with their weights, which are gathered ahead.

    Args:
      iterations, inputs: description of the iterations, and the weights to gather from.
      state: the loop state, or its gradient, before the first visit.
      repeat_at: function from a position in the order of visits to the repeat.
      first: function called with the first repeat's weights; returns the carry.
      visit: function called for i = 0 ... V - 2 with the weights at positions i and i + 1.

    Returns:
      (carry, weights of the last repeat).
    """
    V, ahead = iterations.conveyor.num_repeats, iterations.lookahead

    def gather(i: Index, state: State) -> Params:
        return _gather_repeat(iterations, inputs.weights, repeat_at(i), after=state)

    # 1. Gather the first sets. Without the dependence on the state XLA would keep the forward's
    # last set for the backward, where it is the first.
    window: tuple[Params, ...] = tuple(gather(i, state) for i in range(min(ahead, V)))
    carry = first(window[0])

    # 2. As long as there are repeats to gather: gather the next, compute, drop the oldest.
    def step(
        carry_and_window: tuple[Carry, tuple[Params, ...]], i: Index
    ) -> tuple[Carry, tuple[Params, ...]]:
        carry = carry_and_window[0]
        sets = (*carry_and_window[1], gather(i + ahead, carry.state))
        return visit(carry, i, sets[0], sets[1]), sets[1:]

    num_steps = max(V - ahead, 0)
    start = (carry, window)
    carry, window = loop(step, start, 0, num_steps, scan=iterations.scan_repeats)
    # 3. The last sets are gathered already.
    for i in range(num_steps, V - 1):
        carry = visit(carry, i, window[0], window[1])
        window = window[1:]
    return carry, window[0]


def _gather_repeat(
    iterations: Iterations, weights: Params, repeat: Index, *, after: State | None
) -> Params:
    """Return the gathered weights of a repeat, [S, L, ...], available no earlier than `after`."""
    if after is not None:
        weights, _ = lax.optimization_barrier((weights, after))
    # [V + E, S, L, ...] -> [S, L, ...]
    one_repeat = jax.tree.map(
        lambda p: lax.dynamic_index_in_dim(p, repeat, keepdims=False), weights
    )
    if iterations.gather_once:
        return one_repeat
    return map_gathers(lambda g, p: g.gather(p, leading=SET), iterations.gathers, one_repeat)


def _store_gradient(iterations: Iterations, totals: Params, repeat: Index, sums: Params) -> Params:
    """Store a repeat's gradients [S, L, ...] in the totals, reduced unless `gather_once`."""
    if not iterations.gather_once:
        sums = map_gathers(lambda g, x: g.scatter(x, leading=SET), iterations.gathers, sums)
    return jax.tree.map(
        lambda total, x: lax.dynamic_update_index_in_dim(total, x, repeat, 0), totals, sums
    )


def _split_stages(iterations: Iterations, inputs: DeviceInputs, io: jax.Array) -> SplitVjp:
    """Trace the stages' work, and split its vjp into forward and backward."""
    weights = jax.eval_shape(lambda: _gather_repeat(iterations, inputs.weights, 0, after=None))
    stage_inputs = jax.eval_shape(
        lambda side, key_data: iterations.inputs_of(0, side, key_data),
        inputs.side,
        inputs.key_data,
    )
    # [S, K, B, T, D] -> [S, B, T, D]
    x = jax.ShapeDtypeStruct((io.shape[0], *io.shape[2:]), io.dtype)

    def stages(
        x: jax.Array, trained: Params, inputs: tuple[Params, StageInputs]
    ) -> tuple[jax.Array, AuxiliaryLosses]:
        weights, stage_inputs = inputs
        return iterations.stages(x, with_trainable(weights, trained), stage_inputs)

    return SplitVjp(stages, x, *iterations.operands(weights, stage_inputs))


def _residual_store(iterations: Iterations, residual: ShapedArray) -> jax.Array:
    """Return an array [iterations, ...] in the memory that the remat policy wants for a residual.

    Every iteration writes its own residual before the backward reads it, so nothing is filled
    where the partitioner need not split the array over other axes than stage.
    """
    shape = (iterations.conveyor.num_iterations, *residual.shape)
    # Residuals of kernels and experts, from programs manual over stage, have 1 in place of S.
    has_stages_first = residual.shape[:1] in ((iterations.conveyor.num_stages,), (1,))
    if residual.memory_space == jax.memory.Space.Host:
        return jax.device_put(jnp.zeros(shape, residual.dtype), jax.memory.Space.Host)
    # A loop over layers saves [L, S, ...].
    if iterations.scan_layers or not has_stages_first or not is_manual(iterations.mesh):
        return jnp.zeros(shape, residual.dtype)
    own = (shape[0], 1, *shape[2:])  # [iterations, S, ...] -> [iterations, 1, ...]
    if own == shape:  # every device holds all of it, for its own stage's values
        return lax.empty(own, residual.dtype)
    return jax.shard_map(
        lambda: lax.empty(own, residual.dtype),
        axis_names=automatic_axes(),
        check_vma=False,
        in_specs=(),
        out_specs=PartitionSpec(None, "stage"),
    )()


def _float32_zeros(weights: Params) -> Params:
    return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
