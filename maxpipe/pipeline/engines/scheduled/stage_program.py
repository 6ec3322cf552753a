"""Run one stage: loops over ticks, each with F, head, B, W, transfers and the embedding.

It runs inside a `shard_map` that is manual over stage, data, fsdp, expert and context; arrays are
one device's parts. What each tick reads and writes comes from the plan (`plan.LockstepPlan`), whose
columns differ between stages, so that one program serves them all.

An example, lockstep 1F1B with S=2 stages, M=3 microbatches, V=1 repeat, as `plan.plan_text` prints
it. A unit such as `1F0` is global chunk, kind, microbatch; a0, g0, r0 are slots of this stage's
activation, gradient and residual stores.

    tick  stage  slots                                                    receives
    0     0      0F0: embedding -> r0
          1      idle                                                     a0
    1     0      0F1: embedding -> r1                                     g0
          1      1F0: a0 -> r0; head 0; 1B0: head r0                      a0
    2     0      0F2: embedding -> r2; 0B0: g0 r0 -> embedding            g0
          1      1F1: a0 -> r0; head 1; 1B1: head r0                      a0
    3     0      0B1: g0 r1 -> embedding                                  g0
          1      1F2: a0 -> r0; head 2; 1B2: head r0
    4     0      0B2: g0 r2 -> embedding
          1      idle

In tick 1 stage 1 runs its first F, the head and its first B, which takes the head's gradient as it
is computed, and reads the residuals that the F has just written. Both stages then send: stage 0 its
output for microbatch 1, which stage 1 reads from a0 in tick 2, and stage 1 the gradient of its
input, which stage 0 reads from g0. Three loops cover the five ticks: F alone (tick 0), F and B
(ticks 1 to 3), B alone (tick 4). In each, all stages run the same slots. An idle slot computes on
any operands; its results go to scratch slots and are masked out of sums, or a conditional skips it.

Letters: S stages, V repeats, L layers per chunk, M microbatches, B sequences of a microbatch on one
data shard, T tokens of each on one device, D embed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, TypeVarTuple

import jax
import jax.numpy as jnp
from jax import lax

from maxpipe.model.layers import AuxiliaryLosses
from maxpipe.model.parameters import Params
from maxpipe.pipeline import microbatches
from maxpipe.pipeline.engines.base import Batch, add
from maxpipe.pipeline.engines.scheduled.carry import (
    Carry,
    Chunk,
    ChunkInputs,
    ChunkOutputs,
    ChunkVjp,
    Weights,
    add_auxiliary,
    add_to_layers,
    filled,
    read,
    read_all,
    read_chunk,
    read_layers,
    with_base,
    write,
    write_all,
)
from maxpipe.pipeline.engines.scheduled.ends import ShardedEmbedding, ShardedHead
from maxpipe.pipeline.engines.scheduled.outside import LayerInputs, ShardedLayers
from maxpipe.pipeline.engines.scheduled.tick_plan import (
    BackwardSlot,
    LockstepPlan,
    PlanArray,
    WeightSlot,
)
from maxpipe.pipeline.engines.scheduled.weight_transfers import WeightTransfers
from maxpipe.pipeline.manual import after, ring
from maxpipe.pipeline.split_vjp import Arrays, SplitBackwardVjp

Result = TypeVar("Result")
Tree = TypeVar("Tree")  # an array or a pytree of arrays
Operands = TypeVarTuple("Operands")


@dataclass(frozen=True)
class Settings:
    """Options of the program that do not depend on the device.

    Attributes:
      num_stages: S.
      delayed: whether transfers take a tick longer.
      skip_idle: whether a conditional skips idle slots; otherwise they are computed and masked.
      in_order: whether collectives wait for each other, see `manual.after`.
      idle_fill: what idle slots return and, unless it is 0, what stores hold at first; tests use
        NaN. With 0 stores may hold anything at first.
    """

    num_stages: int
    delayed: bool
    skip_idle: bool
    in_order: bool
    idle_fill: float = 0.0


@dataclass(frozen=True)
class StageProgram:
    """One stage's part of a step.

    Attributes:
      chunk: (x [B, T, D], parameters of a chunk, its inputs) -> (y [B, T, D], auxiliary losses).
      embedding_table: local columns of the embedding table.
      layers: parameters of this stage [V, L, ...].
      layer_specs: the `ParamSpec`s of one layer.
      by_layer: whether `chunk` takes one tree of parameters per layer, since it runs no loop.
      layer_index: indices of this stage's layers in model order, int32 [V + E, L].
      outer: parameters as the head takes them.
      before: the layers before the pipeline, if there are any.
      before_weights: their parameters, [num_outside, ...]; empty if there are none.
      batch: microbatches [B, M, ...] of this data shard.
      key: key of the step or None.
      weight_transfers: gathers the weights of a chunk before it takes them, and sums up their
        gradients; None if it gathers its own, or needs no gathering.
      loss_scale, aux_scale: float32 scalars, inverse of the global weight sum and number of
        sequences.
    """

    settings: Settings
    chunk: Chunk
    embedding: ShardedEmbedding
    head: ShardedHead
    embedding_table: jax.Array
    layers: Params
    layer_specs: Params
    by_layer: bool
    layer_index: jax.Array
    outer: Params
    before: ShardedLayers | None
    before_weights: Params
    batch: Batch
    key: jax.Array | None
    weight_transfers: WeightTransfers | None
    loss_scale: jax.Array
    aux_scale: jax.Array

    def run(self, plan: LockstepPlan, vjp: ChunkVjp | None, carry: Carry) -> Carry:
        """Run all ticks of a plan, phase by phase.

        Args:
          vjp: the chunk's vjp, a `SplitBackwardVjp` if the plan splits backwards; None to run only
            forward and sum up the cross-entropy.
          carry: empty stores and zero sums.
        """
        # This stage's indices as arrays over ticks: all that differs between stages.
        column = plan.column(lax.axis_index("stage"))
        whole = self.layers, self.outer, self.before_weights
        carry = carry._replace(activations=self._after(carry.activations, whole))
        for number, (start, stop) in enumerate(plan.phases):
            # NumPy arrays of all stages, the same on every device: they may decide what to trace.
            phase = plan.ticks(start, stop)
            tick = partial(self._tick, phase, vjp)
            with jax.named_scope(f"phase_{number}"):
                carry, _ = lax.scan(tick, carry, column.ticks(start, stop))
        return self._after(carry, carry.gradients, carry.layer_gradients)

    def _tick(
        self, phase: LockstepPlan, vjp: ChunkVjp | None, carry: Carry, tick: LockstepPlan
    ) -> tuple[Carry, None]:
        """Run one tick; return the carry for the next, as the body of a scan does.

        Args:
          phase: the ticks of this loop on all stages, known while tracing; what none of them does
            is not compiled.
          tick: this stage's indices in this tick, scalars.
        """
        y = dx = head_gradient = residuals = None
        has_B, has_W = phase.B.active.any(), phase.W.active.any()

        # 1. Read the residuals of the B slot before the F slot writes its own, so that neither slot
        # waits for the other; but after it in a phase where some B needs its own tick's residuals.
        if has_B and not phase.reuses_residuals_in_tick:
            residuals = read_all(carry.residuals, tick.B.residuals)
            if phase.stores_head_gradient:
                # XLA would fuse reads with the F slot's writes, and B would wait for F, as it does
                # anyway in other phases: there it takes the gradient of its own tick's head.
                residuals, stores = lax.optimization_barrier((residuals, carry.residuals))
                carry = carry._replace(residuals=stores)

        # 2. F slot: a chunk's forward, from the embedding or an arrived activation.
        if phase.F.active.any():
            carry, y = self._forward(phase, vjp, carry, tick)

        # 3. Head: loss and gradient of the last stage's output; all stages share the work.
        if (phase.ends.head >= 0).any():
            assert y is not None
            carry, head_gradient = self._head(vjp is not None, carry, tick, y)
        # Slots read their indices from `tick`, so this makes the following ones wait.
        tick = self._after(tick, y, head_gradient)

        # 4. B slot: a chunk's backward, from the head's gradient or an arrived one.
        if has_B:
            assert vjp is not None
            if residuals is None:
                residuals = read_all(carry.residuals, tick.B.residuals)
            carry, dx = self._backward(phase, vjp, carry, tick, residuals, head_gradient)
            tick = self._after(tick, dx)

        # 5. W slot: the weight gradients that an I, perhaps this tick's, has left.
        if has_W:
            assert isinstance(vjp, SplitBackwardVjp)
            carry = self._weight_gradients(vjp, carry, tick)

        # 6. Store the head's gradient for a later B; this tick's B has read that slot by now.
        if phase.stores_head_gradient:
            assert head_gradient is not None
            gradients = write(carry.gradients, tick.ends.head_gradient, head_gradient)
            carry = carry._replace(gradients=gradients)

        # 7. Transfers: y to the next stage, dx to the previous one.
        carry = self._transfer(phase, carry, tick, y, dx)
        tick = self._after(tick, carry.activations, carry.gradients)

        # 8. Gradients of the weights before the first chunk, from its dx. With a frozen table and
        # no layers before the pipeline there are none.
        trains_before = carry.table_gradient is not None or self.before is not None
        if dx is not None and trains_before and (phase.ends.embed_backward >= 0).any():
            if self.weight_transfers:
                carry, dx = self.weight_transfers.arrived(carry, dx)
            carry = self._embed_backward(carry, tick.ends.embed_backward, dx)
        return carry, None

    @jax.named_scope("forward")
    def _forward(
        self, phase: LockstepPlan, vjp: ChunkVjp | None, carry: Carry, tick: LockstepPlan
    ) -> tuple[Carry, jax.Array]:
        """Run the F slot; return the carry with residuals written, and the output [B, T, D]."""
        # A stage that embeds, or idles, reads the scratch slot.
        x = read(carry.activations, tick.F.reads)
        if phase.F.embeds.any():
            no_aux = jax.tree.map(jnp.zeros_like, carry.aux) if self.before else {}
            embedded, aux = self._embed(tick.ends.embed, x, no_aux)
            x = jnp.where(tick.F.embeds, embedded, x)
            carry = carry._replace(aux=add_auxiliary(carry.aux, aux))

        def compute(
            x: jax.Array, weights: Weights, inputs: ChunkInputs
        ) -> tuple[ChunkOutputs, Arrays]:
            if vjp is None:
                return self.chunk(x, weights, inputs), []
            return vjp.forward(x, weights, inputs)

        weights, inputs = self.chunk_operands(tick.F.chunk, tick.F.microbatch)
        (y, aux), residuals = self._unless_idle(tick.F.active, compute, x, weights, inputs)
        # An idle slot writes to the scratch slot, and its auxiliary losses do not count.
        stores = write_all(carry.residuals, tick.F.residuals, residuals)
        total = jax.tree.map(lambda t, a: t + jnp.where(tick.F.active, a, 0), carry.aux, aux)
        return carry._replace(residuals=stores, aux=total), y

    @jax.named_scope("embedding")
    def _embed(
        self, microbatch: PlanArray, like: jax.Array, no_aux: AuxiliaryLosses
    ) -> tuple[jax.Array, AuxiliaryLosses]:
        """Run a microbatch up to the first chunk; return zeros and `no_aux` if it is negative.

        The input of the first chunk is [B, T, D], the losses are those of this stage's share.
        """

        def first_input(microbatch: jax.Array) -> tuple[jax.Array, AuxiliaryLosses]:
            batch = self._microbatch(microbatch)
            x = self.embedding.lookup(self.embedding_table, batch["tokens"])
            if self.before is None:
                return x, no_aux
            return self.before.forward(self.before_weights, x, self._layer_inputs(batch))

        # All stages take part, so the predicate is the tick's, not the stage's.
        return lax.cond(
            microbatch >= 0,
            first_input,
            lambda _: (jnp.zeros_like(like), no_aux),
            jnp.maximum(microbatch, 0),
        )

    @jax.named_scope("head")
    def _head(
        self, train: bool, carry: Carry, tick: LockstepPlan, y: jax.Array
    ) -> tuple[Carry, jax.Array]:
        """Run the head; return the carry with sums, and the gradient for y [B, T, D]."""
        batch = self._microbatch(jnp.maximum(tick.ends.head, 0))
        targets, weights = batch["targets"], batch["weights"]
        Sums = tuple[jax.Array, AuxiliaryLosses, Params]
        operands = self.outer, y, targets, weights

        def active(sums: Sums) -> tuple[Sums, jax.Array]:
            loss_sum, aux_sum, outer = sums
            inputs = self._layer_inputs(batch)
            if not train:
                cross_entropy = self.head.losses(*operands, inputs)[1]
                return (loss_sum + cross_entropy, aux_sum, outer), jnp.zeros_like(y)
            scales = self.loss_scale, self.aux_scale
            (loss, aux), y_gradient, outer_gradient = self.head.losses_and_gradients(
                *operands, scales, inputs
            )
            outer = jax.tree.map(add, outer, outer_gradient)
            return (loss_sum + loss, add_auxiliary(aux_sum, aux), outer), y_gradient

        def idle(sums: Sums) -> tuple[Sums, jax.Array]:
            return sums, jnp.full_like(y, self.settings.idle_fill)

        # The predicate is the tick's, not the stage's: the head scatters tokens over all stages.
        (loss, aux, outer), gradient = lax.cond(
            tick.ends.head >= 0, active, idle, (carry.loss, carry.aux, carry.outer_gradients)
        )
        return carry._replace(loss=loss, aux=aux, outer_gradients=outer), gradient

    @jax.named_scope("backward")
    def _backward(
        self,
        phase: LockstepPlan,
        vjp: ChunkVjp,
        carry: Carry,
        tick: LockstepPlan,
        residuals: Arrays,
        head_gradient: jax.Array | None,
    ) -> tuple[Carry, jax.Array]:
        """Run the B slot; return the carry, and the gradient for the chunk's input [B, T, D].

        Weight gradients are added to the carry, or the stash that they need is written.
        """
        assert carry.gradients is not None
        dy = read(carry.gradients, tick.B.reads)
        if phase.stores_head_gradient:
            # As for residuals: the write of the head's gradient waits for F.
            dy, gradients = lax.optimization_barrier((dy, carry.gradients))
            carry = carry._replace(gradients=gradients)
        if phase.B.from_head.any():
            assert head_gradient is not None
            dy = jnp.where(tick.B.from_head, head_gradient, dy)
        # Auxiliary losses have a cotangent of their own, their weight in the total loss.
        weights, inputs = self.chunk_operands(tick.B.chunk, tick.B.microbatch)
        daux = jax.tree.map(lambda a: jnp.full_like(a, self.aux_scale), carry.aux)
        operands = residuals, weights, inputs, (dy, daux)
        if isinstance(vjp, SplitBackwardVjp):
            # I: weight gradients are left to the W slot.
            dx, stash = self._unless_idle(tick.B.active, vjp.input_gradient, *operands)
            carry = carry._replace(stash=write_all(carry.stash, tick.B.stash, stash))
        else:
            dx, dw = self._unless_idle(tick.B.active, vjp.backward, *operands)
            carry = self._add_gradients(carry, tick.B, dw)
        return carry, dx

    @jax.named_scope("backward")
    @jax.named_scope("embedding")
    def _embed_backward(self, carry: Carry, microbatch: PlanArray, dx: jax.Array) -> Carry:
        """Add the gradients of the weights before the first chunk, from its dx for a microbatch.

        These weights are the embedding table, if trained, and the layers before the pipeline.
        Nothing is added if `microbatch` is negative.
        """
        Sums = tuple[jax.Array | None, Params | None]

        def active(sums: Sums) -> Sums:
            table, layers = sums
            batch, gradient = self._microbatch(jnp.maximum(microbatch, 0)), dx
            if self.before is not None:
                x = self.embedding.lookup(self.embedding_table, batch["tokens"])
                gradient, layer_gradients = self.before.gradients(
                    self.before_weights, x, self._layer_inputs(batch), dx, self.aux_scale
                )
                layers = jax.tree.map(add, layers, layer_gradients)
            if table is not None:
                table = self.embedding.add_gradient(table, batch["tokens"], gradient)
            return table, layers

        # As for the lookup, the predicate is the tick's.
        table, layers = lax.cond(
            microbatch >= 0,
            active,
            lambda sums: sums,
            (carry.table_gradient, carry.before_gradients),
        )
        return carry._replace(table_gradient=table, before_gradients=layers)

    @jax.named_scope("weight_gradients")
    def _weight_gradients(
        self,
        vjp: SplitBackwardVjp[Weights, ChunkInputs, ChunkOutputs],
        carry: Carry,
        tick: LockstepPlan,
    ) -> Carry:
        """Run the W slot; return the carry with weight gradients added."""
        residuals = read_all(carry.residuals, tick.W.residuals)
        stash = read_all(carry.stash, tick.W.stash)
        weights, inputs = self.chunk_operands(tick.W.chunk, tick.W.microbatch)
        dw = self._unless_idle(
            tick.W.active, vjp.weight_gradients, residuals, weights, inputs, stash
        )
        return self._add_gradients(carry, tick.W, dw)

    def _add_gradients(
        self, carry: Carry, slot: BackwardSlot | WeightSlot, gradients: Weights
    ) -> Carry:
        """Add the weight gradients of a unit, zeros if its slot is idle."""
        if self.weight_transfers is None:
            return add_to_layers(carry, slot.active, slot.chunk, gradients)
        assert isinstance(gradients, tuple)
        return self.weight_transfers.add(carry, slot, gradients)

    @jax.named_scope("transfer")
    def _transfer(
        self,
        phase: LockstepPlan,
        carry: Carry,
        tick: LockstepPlan,
        y: jax.Array | None,
        dx: jax.Array | None,
    ) -> Carry:
        """Send outputs to the neighbours and store what arrives; unconditional, on all stages."""
        size, activation, gradient = self.settings.num_stages, y, dx
        # Delayed, the transfer takes the outputs of the tick before, so that it can overlap this
        # tick's slots, and this tick's outputs wait in the carry.
        if self.settings.delayed:
            activation, gradient = carry.outgoing_activation, carry.outgoing_gradient
            carry = carry._replace(
                outgoing_activation=activation if y is None else y,
                outgoing_gradient=gradient if dx is None else dx,
            )
        # All stages send and receive; what no unit will read goes to the scratch slot.
        computed = y, dx, carry.loss, carry.layer_gradients
        activation, gradient = self._after((activation, gradient), *computed)
        if phase.activations_arrive:
            assert activation is not None
            store = write(carry.activations, tick.F.arrival, ring(activation, size, +1))
            carry = carry._replace(activations=store)
        if phase.gradients_arrive:
            assert gradient is not None
            store = write(carry.gradients, tick.B.arrival, ring(gradient, size, -1))
            carry = carry._replace(gradients=store)
        return carry

    def chunk_operands(
        self, chunk: PlanArray, microbatch: PlanArray
    ) -> tuple[Weights, ChunkInputs]:
        """Return the trained parameters of a chunk and its inputs for a microbatch."""
        side = microbatches.side_inputs(self._microbatch(microbatch))
        inputs = ChunkInputs(read(self.layer_index, chunk), side, self.key)
        if self.weight_transfers:
            return with_base(self.layer_specs, self.weight_transfers.gathered(chunk), inputs)
        # Barrier: otherwise XLA hoists the cast of all chunks' weights out of the loop and keeps
        # the copies.
        layers, chunk = lax.optimization_barrier((self.layers, chunk))
        weights = read_layers(layers, chunk) if self.by_layer else read_chunk(layers, chunk)
        return with_base(self.layer_specs, weights, inputs)

    def _layer_inputs(self, batch: Batch) -> LayerInputs:
        return LayerInputs(microbatches.side_inputs(batch), self.key)

    def _microbatch(self, index: PlanArray) -> Batch:
        return microbatches.column(self.batch, jnp.asarray(index))

    def _after(self, values: Tree, *earlier: object) -> Tree:
        """Return `values`; with `in_order` only once `earlier` has been computed."""
        return after(values, *earlier) if self.settings.in_order else values

    def _unless_idle(
        self, active: PlanArray, compute: Callable[[*Operands], Result], *operands: *Operands
    ) -> Result:
        """Call `compute`; with `skip_idle` return `idle_fill` instead if the slot is idle."""
        if not self.settings.skip_idle:
            return compute(*operands)
        shapes = jax.eval_shape(compute, *operands)

        def idle(*_: *Operands) -> Result:
            return jax.tree.map(lambda s: filled(s.shape, s.dtype, self.settings.idle_fill), shapes)

        return lax.cond(active, compute, idle, *operands)
