"""What one stage does in a tick: F slot, head, B slot, W slot, transfers; inside the manual program of `scheduled`.

Letters: S stages, V repeats, L layers per chunk, M microbatches, B sequences of a microbatch on one
data shard, T sequence, D embed. A `row` is one tick of the plan as this stage sees it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from maxpipe.model.parameters import Params
from maxpipe.pipeline import microbatches
from maxpipe.pipeline.engines.scheduled.ends import Embedding, Head
from maxpipe.pipeline.engines.scheduled.plan import LockstepPlan, PhaseFacts, Row, stage_rows
from maxpipe.pipeline.engines.scheduled.split_vjp import HalvedVjp, SplitVjp
from maxpipe.pipeline.manual import ring


class Carry(NamedTuple):
    """What a tick hands to the next.

    Attributes:
      activations, gradients: arrived ones, [slots + 1, B, T, D]; the last slot is scratch for what
        nobody reads.
      residuals: for each kept residual [slots + 1, ...].
      stash: with split backwards the same for each array between an input gradient and its weight
        gradients.
      leaving_f, leaving_b: with delayed forwarding what the next transfer takes along, [B, T, D];
        else None.
      layers: float32 gradients [V, L, ...] of this stage's layers.
      head: float32 gradients of what the head takes; table: of the local columns of the embedding
        table.
      loss, aux: float32 scalars, sums of this stage.
    """

    activations: jax.Array
    gradients: jax.Array | None
    residuals: list[jax.Array]
    stash: list[jax.Array]
    leaving_f: jax.Array | None
    leaving_b: jax.Array | None
    layers: Params
    head: Params
    table: jax.Array | None
    loss: jax.Array
    aux: jax.Array


@dataclass(frozen=True)
class Settings:
    """Options of the program that do not depend on the device.

    Attributes:
      num_stages: S.
      delayed: transfers take a tick longer.
      skip_idle: idle slots are skipped by a conditional instead of computed masked.
      idle_fill: what idle slots and unwritten stores hold; tests fill them with NaN.
    """

    num_stages: int
    delayed: bool
    skip_idle: bool
    idle_fill: float = 0.0


@dataclass(frozen=True)
class StageProgram:
    """One stage's part of a step.

    Attributes:
      settings: see there.
      chunk: (x [B,T,D], chunk's parameters [L, ...], (layer index [L], side inputs, key)) -> (y,
        auxiliary loss).
      embedding, head: the ends.
      table: local columns of the embedding table.
      layers: parameters of this stage [V, L, ...], as `chunk` takes them.
      layer_index: int32 [V, L].
      outer: parameters as the head takes them.
      batch: microbatches [B, M, ...] of this data shard.
      key: key of the step or None.
      loss_scale, aux_scale: float32 scalars, inverse of the global weight sum and number of
        sequences.
    """

    settings: Settings
    chunk: Callable[[jax.Array, Params, Any], tuple[jax.Array, jax.Array]]
    embedding: Embedding
    head: Head
    table: jax.Array
    layers: Params
    layer_index: jax.Array
    outer: Params
    batch: dict[str, jax.Array]
    key: jax.Array | None
    loss_scale: jax.Array
    aux_scale: jax.Array

    def run(self, plan: LockstepPlan, split: SplitVjp | None, carry: Carry) -> Carry:
        """All ticks.

        Args:
          plan: what to do in them.
          split: vjp of the chunk, a `HalvedVjp` if the plan splits backwards; None to run forward
            only and sum up the cross-entropy.
          carry: empty stores, zeros.
        """
        rows = stage_rows(plan)
        for phase in plan.phases:
            facts = PhaseFacts.of(plan, phase)
            part = jax.tree.map(lambda a, p=phase: a[p.start : p.stop], rows)

            def tick(carry: Carry, row: Row, facts: PhaseFacts = facts) -> tuple[Carry, None]:
                return self._tick(facts, split, carry, row), None

            carry, _ = lax.scan(tick, carry, part)
        return carry

    def _tick(self, facts: PhaseFacts, split: SplitVjp | None, carry: Carry, row: Row) -> Carry:
        kept = None
        if facts.has_B and not facts.same_tick:
            # Read before F writes, so that neither slot waits for the other.
            kept = _read_all(carry.residuals, row["residual_slot_b"])
        y = dx = head_gradient = None
        if facts.has_F:
            carry, y = self._forward(facts, split, carry, row)
        if facts.has_head:
            assert y is not None
            carry, head_gradient = self._head(split is not None, carry, row, y)
        if facts.has_B:
            assert split is not None
            kept = kept or _read_all(carry.residuals, row["residual_slot_b"])
            carry, dx = self._backward(facts, split, carry, row, kept, head_gradient)
        if facts.has_W:
            assert isinstance(split, HalvedVjp)
            carry = self._weight_gradients(split, carry, row)
        if facts.stores_head_gradient:
            assert head_gradient is not None
            gradients = _write(carry.gradients, row["head_gradient_slot"], head_gradient)
            carry = carry._replace(gradients=gradients)
        return self._transfer(facts, carry, row, y, dx)

    def _forward(
        self, facts: PhaseFacts, split: SplitVjp | None, carry: Carry, row: Row
    ) -> tuple[Carry, jax.Array]:
        """F slot: (carry with residuals written, output [B,T,D])."""
        x = _read(carry.activations, row["f_in_slot"])
        if facts.embeds:
            embedded = self._embed(row, x)
            x = jnp.where(row["f_embeds"], embedded, x)
        weights, rest = self.inputs(row["f_chunk"], row["f_microbatch"])

        def compute(x: jax.Array, weights: Params, rest: Any) -> Any:
            return (
                (self.chunk(x, weights, rest), [])
                if split is None
                else split.forward(x, weights, rest)
            )

        (y, aux), kept = self._unless_idle(row["f_active"], compute, x, weights, rest)
        residuals = _write_all(carry.residuals, row["residual_slot_f"], kept)
        aux = carry.aux + jnp.where(row["f_active"], aux, 0)
        return carry._replace(residuals=residuals, aux=aux), y

    def _embed(self, row: Row, like: jax.Array) -> jax.Array:
        # All stages take part, so the predicate is the tick's, not the stage's.
        def lookup(microbatch: jax.Array) -> jax.Array:
            return self.embedding.lookup(self.table, self._microbatch(microbatch)["tokens"])

        return lax.cond(
            row["embed_f"] >= 0,
            lookup,
            lambda _: jnp.zeros_like(like),
            jnp.maximum(row["embed_f"], 0),
        )

    def _head(self, train: bool, carry: Carry, row: Row, y: jax.Array) -> tuple[Carry, jax.Array]:
        """Head of the last stage's output: (carry with loss and gradients added, gradient for y)."""
        microbatch = jnp.maximum(row["head_microbatch"], 0)
        batch = self._microbatch(microbatch)
        targets, weights = batch["targets"], batch["weights"]

        def active(total: tuple[jax.Array, Params]) -> tuple[tuple[jax.Array, Params], jax.Array]:
            loss_sum, outer = total
            if not train:
                return (
                    loss_sum + self.head.losses(self.outer, y, targets, weights)[1],
                    outer,
                ), jnp.zeros_like(y)
            loss, gradient, added = self.head.losses_and_gradients(
                self.outer, y, targets, weights, self.loss_scale
            )
            return (loss_sum + loss, jax.tree.map(_add, outer, added)), gradient

        def idle(total: tuple[jax.Array, Params]) -> tuple[tuple[jax.Array, Params], jax.Array]:
            return total, jnp.full_like(y, self.settings.idle_fill)

        (loss, outer), gradient = lax.cond(
            row["head_microbatch"] >= 0, active, idle, (carry.loss, carry.head)
        )
        return carry._replace(loss=loss, head=outer), gradient

    def _backward(
        self,
        facts: PhaseFacts,
        split: SplitVjp,
        carry: Carry,
        row: Row,
        kept: list[jax.Array],
        head_gradient: jax.Array | None,
    ) -> tuple[Carry, jax.Array]:
        """B slot: (carry with gradients added or what they need stashed, gradient for the chunk's input [B,T,D])."""
        assert carry.gradients is not None
        dy = _read(carry.gradients, row["b_in_slot"])
        if facts.head_in_tick:
            assert head_gradient is not None
            dy = jnp.where(row["b_from_head"], head_gradient, dy)
        weights, rest = self.inputs(row["b_chunk"], row["b_microbatch"])
        arguments = kept, weights, rest, (dy, self.aux_scale)
        if isinstance(split, HalvedVjp):
            dx, stash = self._unless_idle(row["b_active"], split.input_gradient, *arguments)
            carry = carry._replace(stash=_write_all(carry.stash, row["stash_slot_b"], stash))
        else:
            dx, dw = self._unless_idle(row["b_active"], split.backward, *arguments)
            carry = _add_to_layers(carry, row["b_active"], row["b_chunk"], dw)
        if facts.embeds_backward:
            carry = carry._replace(table=self._embed_backward(carry, row, dx))
        return carry, dx

    def _weight_gradients(self, split: HalvedVjp, carry: Carry, row: Row) -> Carry:
        """W slot: carry with gradients added."""
        kept, stash = (
            _read_all(carry.residuals, row["residual_slot_w"]),
            _read_all(carry.stash, row["stash_slot_w"]),
        )
        weights, rest = self.inputs(row["w_chunk"], row["w_microbatch"])
        dw = self._unless_idle(row["w_active"], split.weight_gradients, kept, weights, rest, stash)
        return _add_to_layers(carry, row["w_active"], row["w_chunk"], dw)

    def _embed_backward(self, carry: Carry, row: Row, dx: jax.Array) -> jax.Array:
        def active(total: jax.Array) -> jax.Array:
            tokens = self._microbatch(jnp.maximum(row["embed_b"], 0))["tokens"]
            return self.embedding.add_gradient(total, tokens, dx)

        return lax.cond(row["embed_b"] >= 0, active, lambda total: total, carry.table)

    def _transfer(
        self, facts: PhaseFacts, carry: Carry, row: Row, y: jax.Array | None, dx: jax.Array | None
    ) -> Carry:
        """Sends outputs to the neighbours and stores what arrives; unconditional, on all stages."""
        size, leaving_f, leaving_b = self.settings.num_stages, y, dx
        if self.settings.delayed:
            leaving_f, leaving_b = carry.leaving_f, carry.leaving_b
            carry = carry._replace(
                leaving_f=leaving_f if y is None else y, leaving_b=leaving_b if dx is None else dx
            )
        if facts.activations_arrive:
            stored = _write(carry.activations, row["arrive_f_slot"], ring(leaving_f, size, +1))
            carry = carry._replace(activations=stored)
        if facts.gradients_arrive:
            stored = _write(carry.gradients, row["arrive_b_slot"], ring(leaving_b, size, -1))
            carry = carry._replace(gradients=stored)
        return carry

    def inputs(self, chunk: jax.Array, microbatch: jax.Array) -> tuple[Params, Any]:
        """(parameters of a chunk [L, ...], (layer index [L], side inputs [B, ...], key))."""
        # Tied to the tick's chunk, lest XLA casts the weights of all chunks before the loop and
        # keeps the copies.
        layers, chunk = lax.optimization_barrier((self.layers, chunk))
        weights, index = jax.tree.map(lambda a: _read(a, chunk), (layers, self.layer_index))
        side = microbatches.side_inputs(self._microbatch(microbatch))
        return weights, (index, side, self.key)

    def _microbatch(self, index: jax.Array) -> dict[str, jax.Array]:
        return microbatches.column(self.batch, index)

    def _unless_idle(self, active: jax.Array, compute: Callable[..., Any], *args: Any) -> Any:
        if not self.settings.skip_idle:
            return compute(*args)
        shapes = jax.eval_shape(compute, *args)

        def idle(*_: Any) -> Any:
            return jax.tree.map(lambda s: filled(s.shape, s.dtype, self.settings.idle_fill), shapes)

        return lax.cond(active, compute, idle, *args)


def _read(store: jax.Array, slot: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(store, slot, keepdims=False)


def _write(store: Any, slot: jax.Array, value: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(store, value, slot, 0)


def _read_all(stores: Sequence[jax.Array], slot: jax.Array) -> list[jax.Array]:
    return [_read(store, slot) for store in stores]


def _write_all(
    stores: Sequence[jax.Array], slot: jax.Array, values: Sequence[jax.Array]
) -> list[jax.Array]:
    return [_write(store, slot, value) for store, value in zip(stores, values, strict=True)]


def _add_to_layers(carry: Carry, active: jax.Array, chunk: jax.Array, gradients: Params) -> Carry:
    def add(total: jax.Array, g: jax.Array) -> jax.Array:
        return total.at[chunk].add(jnp.where(active, g, 0).astype(total.dtype))

    return carry._replace(layers=jax.tree.map(add, carry.layers, gradients))


def _add(total: jax.Array, g: jax.Array) -> jax.Array:
    return total + g.astype(total.dtype)


def filled(shape: tuple[int, ...], dtype: Any, value: float) -> jax.Array:
    """An array of `value`, or of zeros if the dtype is not floating."""
    return jnp.full(shape, value if jnp.issubdtype(dtype, jnp.floating) else 0, dtype)
