"""Gather a chunk's weights and sum up its gradients from neighbour to neighbour.

TPUs compute while they send to a neighbour, but not during an all-gather. So the weights of a layer
arrive while the chunk computes what comes before that layer, and gradients leave while it computes
others. XLA orders all this by data dependencies; where there are none, as with sums of gradients,
it would start every transfer at the end of a tick, so barriers order those.

Letters as in `stage_program`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from maxpipe.model.parameters import Params
from maxpipe.pipeline.engines.scheduled.carry import Carry, Layers, read_layers
from maxpipe.pipeline.engines.scheduled.tick_plan import BackwardSlot, PlanArray, WeightSlot
from maxpipe.pipeline.manual import Gather, GatherTree, map_gathers

# Sums of gradients in flight at once. Libtpu has at most five transfers in flight, including those
# of activations; two and four were predicted to be slower.
_AT_ONCE = 3


@dataclass(frozen=True)
class WeightTransfers:
    """Transfers of one stage's weights, shards [V, L, ...] of them, and of their gradients."""

    gathers: GatherTree
    layers: Params

    @jax.named_scope("gather")
    def gathered(self, chunk: PlanArray) -> Layers:
        # Barrier: otherwise XLA hoists the cast of all chunks' weights out of the loop and keeps
        # the copies.
        layers, chunk = lax.optimization_barrier((self.layers, chunk))
        return tuple(
            map_gathers(Gather.gather_in_steps, self.gathers, layer)
            for layer in read_layers(layers, chunk)
        )

    def add(self, carry: Carry, slot: BackwardSlot | WeightSlot, gradients: Layers) -> Carry:
        """Add a unit's gradients, summed over devices, to this stage's; zeros if the slot is idle.

        They are this device's gradients of full parameters; None where one is frozen.
        """
        # Frozen parameters have None, which is not a leaf.
        totals, structure = jax.tree.flatten(carry.layer_gradients)
        parts = [jax.tree.leaves(layer) for layer in gradients]
        of_all = jax.tree.leaves(carry.layer_gradients, is_leaf=lambda leaf: leaf is None)
        gathers = [
            gather
            for gather, total in zip(jax.tree.leaves(self.gathers), of_all, strict=True)
            if total is not None
        ]
        # A total waits for its own previous sum, which with few parameters comes sooner.
        at_once = min(_AT_ONCE, len(totals))
        # From the last layer on, as they are computed.
        places = [(i, k) for i in reversed(range(len(parts))) for k in range(len(totals))]
        for number, (i, k) in enumerate(places):
            gradient = parts[i][k]
            if number >= at_once:
                earlier = places[number - at_once][1]
                gradient, totals[earlier] = lax.optimization_barrier((gradient, totals[earlier]))
            summed = jnp.where(slot.active, gathers[k].scatter_in_steps(gradient), 0)
            totals[k] = totals[k].at[slot.chunk, i].add(summed)
        return carry._replace(layer_gradients=jax.tree.unflatten(structure, totals))

    def arrived(self, carry: Carry, dx: jax.Array) -> tuple[Carry, jax.Array]:
        """Return both once all transfers of a tick have arrived.

        A conditional that holds collectives follows. No transfer is in flight during it, and XLA
        would start them after it, where nothing hides them.
        """
        received = carry.activations, carry.gradients, carry.layer_gradients
        received, dx = lax.optimization_barrier((received, dx))
        activations, gradients, totals = received
        carry = carry._replace(activations=activations, gradients=gradients, layer_gradients=totals)
        return carry, dx
