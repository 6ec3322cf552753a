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
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.sharding import PartitionSpec

from maxpipe.model.layers import AuxiliaryLosses, SideInputs
from maxpipe.model.parameters import Params, with_trainable
from maxpipe.pipeline.engines.base import float32_zeros
from maxpipe.pipeline.engines.circular.conveyor import State
from maxpipe.pipeline.engines.circular.phases import (
    BackwardCarry,
    ForwardCarry,
    Index,
    Iterations,
    Phases,
    StageInputs,
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
from maxpipe.pipeline.split_vjp import Arrays, SplitVjp

SET = ("stage", None)  # mesh axes of the leading dimensions [S, L] of a set of weights
REPLICATED = PartitionSpec()
PER_DEVICE = PartitionSpec(BATCH_AXES)  # one row, or one part of the first dimension, per device

Carry = TypeVar("Carry", ForwardCarry, BackwardCarry)
Window = tuple[Params, ...]  # gathered weights of neighbouring repeats, in the order of visits

# ------------------------------------------------------------------------------------------------
# The differentiable entry
# ------------------------------------------------------------------------------------------------


def run_iterations(
    iterations: Iterations,
    layers: Params,
    io: jax.Array,
    side: SideInputs,
    key_data: jax.Array | None,
) -> tuple[jax.Array, AuxiliaryLosses]:
    """Run all iterations; differentiable in `layers` [V + E, S, L, ...] and `io` [S, K, B, T, D].

    Side inputs are [M, B, ...], key data None without dropout. Returns the conveyor with the
    outputs, and auxiliary losses summed over layers and sequences.
    """
    specs, manual = iterations.specs, partial(_manual, iterations)

    def forward(
        layers: Params,
        io: jax.Array,
        side: SideInputs,
        key_data: jax.Array | None,
        *,
        keep_residuals: bool = False,
    ) -> tuple[tuple[jax.Array, AuxiliaryLosses], Arrays]:
        def on_device(*args: Any) -> tuple[jax.Array, AuxiliaryLosses, Arrays]:
            state, residuals = _forward(iterations, *args, keep_residuals=keep_residuals)
            aux = jax.tree.map(lambda a: a[None], state.aux)
            return iterations.conveyor.outputs(state), aux, residuals

        in_specs = (specs.layers, specs.io, specs.side, REPLICATED)
        run = manual(on_device, in_specs, (specs.io, PER_DEVICE, PER_DEVICE))
        io, aux, residuals = run(layers, io, side, key_data)
        return (io, jax.tree.map(partial(jnp.sum, axis=0), aux)), residuals

    def backward(saved: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        def on_device(layers: Params, *args: Any) -> tuple[Params, jax.Array]:
            totals, io = _backward(iterations, layers, *args)
            totals = sum_replicas(iterations.gathers, totals, BATCH_AXES)
            trained = iterations.trained(layers)
            return jax.tree.map(lambda g, p: g.astype(p.dtype), totals, trained), io

        in_specs = (specs.layers, specs.side, REPLICATED, PER_DEVICE, specs.io, REPLICATED)
        run = manual(on_device, in_specs, (iterations.trained(specs.layers), specs.io))
        # None, for frozen weights, is a gradient of zero.
        gradients, io = run(*saved, *cotangents)
        return gradients, io, None, None

    def forward_and_save(
        layers: Params, io: jax.Array, side: SideInputs, key_data: jax.Array | None
    ) -> tuple[tuple[jax.Array, AuxiliaryLosses], tuple[Any, ...]]:
        outputs, residuals = forward(layers, io, side, key_data, keep_residuals=True)
        return outputs, (layers, side, key_data, residuals)

    run = jax.custom_vjp(lambda *args: forward(*args)[0])
    run.defvjp(forward_and_save, backward)
    outputs: tuple[jax.Array, AuxiliaryLosses] = run(layers, io, side, key_data)
    return outputs


def _manual(
    iterations: Iterations,
    f: Callable[..., tuple[Any, ...]],
    in_specs: tuple[object, ...],
    out_specs: tuple[object, ...],
) -> Callable[..., tuple[Any, ...]]:
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


def _forward(
    iterations: Iterations,
    layers: Params,
    io: jax.Array,
    side: SideInputs,
    key_data: jax.Array | None,
    *,
    keep_residuals: bool,
) -> ForwardCarry:
    conveyor, source = iterations.conveyor, _source(iterations, layers)
    M, V, fill = conveyor.num_microbatches, conveyor.num_repeats, conveyor.fill_iterations
    state = conveyor.first_state(io, iterations.program.no_auxiliary())
    split = _split_stages(iterations, source, io, side, key_data) if keep_residuals else None
    residuals = [_residual_store(iterations, r) for r in split.residuals] if split else []
    phase = Phases(iterations, side, key_data, split).forward
    # 1. Fill: the stages start on repeat 0.
    gather = partial(_gather_repeat, iterations, source)
    window = _first_window(iterations, gather, state)
    carry = phase(ForwardCarry(state, residuals), 0, fill, window[0])

    # 2. Steady phase of repeat r, then the switch to r + 1.
    def visit(carry: ForwardCarry, r: Index, weights: Params, next_weights: Params) -> ForwardCarry:
        carry = phase(carry, r * M + fill, M - fill, weights)
        return phase(carry, (r + 1) * M, fill, weights, next_weights)

    carry, weights = _visit_repeats(iterations, gather, carry, window, visit)
    # 3. Steady phase of the last repeat, and drain.
    return phase(carry, (V - 1) * M + fill, M, weights)


def _backward(
    iterations: Iterations,
    layers: Params,
    side: SideInputs,
    key_data: jax.Array | None,
    residuals: Arrays,
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
    conveyor, source = iterations.conveyor, _source(iterations, layers)
    M, V, fill = conveyor.num_microbatches, conveyor.num_repeats, conveyor.fill_iterations
    no_aux, trained = iterations.program.no_auxiliary(), iterations.trained
    split = _split_stages(iterations, source, io, side, key_data)
    # 1. Turn the gradient of the outputs into the gradient of the last state.
    last_state = jax.eval_shape(conveyor.first_state, io, no_aux)
    (state,) = transpose(lambda s: (conveyor.outputs(s), s.aux), (last_state,), (io, aux))
    totals = float32_zeros(trained(source))
    phase = partial(Phases(iterations, side, key_data, split).backward, residuals)

    # 2. Drain: the stages finish repeat V - 1.
    def gather(i: Index, after: State) -> Params:
        return _gather_repeat(iterations, source, V - 1 - i, after)

    window = _first_window(iterations, gather, state)
    carry = BackwardCarry(state, float32_zeros(trained(window[0])))
    carry = phase(carry, V * M, fill, window[0])._replace(totals=totals)

    # 3. Steady phase of repeat r = V - 1 - i, then the switch into it, where gradients of r - 1
    # begin. After the last gradient of r its sum is stored.
    def visit(carry: BackwardCarry, i: Index, weights: Params, earlier: Params) -> BackwardCarry:
        r, totals = V - 1 - i, carry.totals
        steady = phase(carry._replace(totals=None), r * M + fill, M - fill, weights)
        start = steady._replace(earlier=float32_zeros(trained(earlier)))
        switch = phase(start, r * M, fill, weights, earlier)
        totals = _store_gradient(iterations, totals, r, switch.sums)
        assert switch.earlier is not None
        return BackwardCarry(switch.state, switch.earlier, None, totals)

    carry, weights = _visit_repeats(iterations, gather, carry, window, visit)
    # 4. Steady phase of repeat 0, and fill.
    gradients = phase(carry._replace(totals=None), 0, M, weights)
    totals = _store_gradient(iterations, carry.totals, 0, gradients.sums)
    # 5. Reduce what was not reduced repeat by repeat. Layers outside the pipeline have no gradient
    # here.
    if iterations.gather_once:
        num_rows = jax.tree.leaves(layers)[0].shape[0]
        totals = map_gathers(
            lambda g, x: g.scatter(x, leading=(None, *SET)), iterations.gathers, totals
        )
        outside = [(0, num_rows - V)]
        totals = jax.tree.map(lambda x: jnp.pad(x, outside + [(0, 0)] * (x.ndim - 1)), totals)
    # 6. Turn the gradient of the first state into the gradient of the inputs.
    io_shape = jax.ShapeDtypeStruct(io.shape, io.dtype)
    (io,) = transpose(partial(conveyor.first_state, aux=no_aux), (io_shape,), gradients.state)
    return totals, io


def _source(iterations: Iterations, layers: Params) -> Params:
    """Return what repeats are gathered from: with `gather_once` all repeats, gathered already.

    [V + E, S, L, ...] -> the same, or full [V, S, L, ...].
    """
    if not iterations.gather_once:
        return layers
    num_repeats = iterations.conveyor.num_repeats

    def gather(gather: Gather, shard: jax.Array) -> jax.Array:
        # Rows from V on belong to layers outside the pipeline.
        return gather.gather(shard[:num_repeats], leading=(None, *SET))

    return map_gathers(gather, iterations.gathers, layers)


def _first_window(
    iterations: Iterations, gather: Callable[[Index, State], Params], state: State
) -> Window:
    # Without the dependence on the state XLA would keep the forward's last set for the backward,
    # where it is the first.
    count = min(iterations.lookahead, iterations.conveyor.num_repeats)
    return tuple(gather(i, state) for i in range(count))


def _visit_repeats(
    iterations: Iterations,
    gather: Callable[[Index, State], Params],
    carry: Carry,
    window: Window,
    visit: Callable[[Carry, Index, Params, Params], Carry],
) -> tuple[Carry, Params]:
    """Visit pairs of neighbouring repeats with their weights, which are gathered ahead.

    Args:
      gather: function from a position in the order of visits, and the state after which it may
        start, to the weights of the repeat there.
      window: the first sets, from `_first_window`.
      visit: function called for i = 0 ... V - 2 with the weights at positions i and i + 1.

    Returns:
      (carry, weights of the last repeat).
    """
    V, ahead = iterations.conveyor.num_repeats, iterations.lookahead

    # 1. As long as there are repeats to gather: gather the next, compute, drop the oldest.
    def step(carry_and_window: tuple[Carry, Window], i: Index) -> tuple[Carry, Window]:
        carry = carry_and_window[0]
        sets = (*carry_and_window[1], gather(i + ahead, carry.state))
        return visit(carry, i, sets[0], sets[1]), sets[1:]

    num_steps = max(V - ahead, 0)
    scan = iterations.config.scan_repeats
    carry, window = loop(step, (carry, window), 0, num_steps, scan=scan)
    # 2. The last sets are gathered already.
    for i in range(num_steps, V - 1):
        carry = visit(carry, i, window[0], window[1])
        window = window[1:]
    return carry, window[0]


def _gather_repeat(
    iterations: Iterations, source: Params, repeat: Index, after: State | None
) -> Params:
    """Return the gathered weights of a repeat, [S, L, ...], available no earlier than `after`."""
    if after is not None:
        source, _ = lax.optimization_barrier((source, after))
    # [V + E, S, L, ...] -> [S, L, ...]
    one_repeat = jax.tree.map(lambda p: lax.dynamic_index_in_dim(p, repeat, keepdims=False), source)
    if iterations.gather_once:
        return one_repeat
    return map_gathers(lambda g, p: g.gather(p, leading=SET), iterations.gathers, one_repeat)


def _store_gradient(
    iterations: Iterations, totals: Params | None, repeat: Index, sums: Params
) -> Params:
    if not iterations.gather_once:
        sums = map_gathers(lambda g, x: g.scatter(x, leading=SET), iterations.gathers, sums)
    return jax.tree.map(
        lambda total, x: lax.dynamic_update_index_in_dim(total, x, repeat, 0), totals, sums
    )


def _split_stages(
    iterations: Iterations,
    source: Params,
    io: jax.Array,
    side: SideInputs,
    key_data: jax.Array | None,
) -> SplitVjp:
    weights = jax.eval_shape(lambda: _gather_repeat(iterations, source, 0, None))
    inputs = jax.eval_shape(partial(iterations.inputs_of, 0), side, key_data)
    # [S, K, B, T, D] -> [S, B, T, D]
    x = jax.ShapeDtypeStruct((io.shape[0], *io.shape[2:]), io.dtype)

    def stages(
        x: jax.Array, trained: Params, inputs: tuple[Params, StageInputs]
    ) -> tuple[jax.Array, AuxiliaryLosses]:
        weights, stage_inputs = inputs
        return iterations.stages(x, with_trainable(weights, trained), stage_inputs)

    return SplitVjp(stages, x, *iterations.operands(weights, inputs))


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
    scans = iterations.config.scan_layers_per_stage
    if scans or not has_stages_first or not is_manual(iterations.mesh):
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
