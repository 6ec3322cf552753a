"""Run layers outside the pipeline on all stages at once: each has a share of a microbatch's rows.

Layers before the pipeline run with the lookup in the embedding, layers after it with the head, in
the tick of the microbatch's first or last chunk. Their backward begins in the same tick as the
head's, or computes them again from the tokens, so nothing is stored for them from tick to tick.
All this is inside the manual program. Letters: S stages, B sequences of a microbatch on one data
shard, T tokens of each, D embed, R = ceil(B / S) rows of a stage's share.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from maxpipe.model.layers import AuxiliaryLosses, SideInputs
from maxpipe.model.parameters import Params, with_trainable
from maxpipe.pipeline.chunk import sum_where
from maxpipe.pipeline.manual import joined_shares, own_share, share_from


class LayerInputs(NamedTuple):
    side: SideInputs  # of the microbatch, [B, ...] each, on every stage
    key: jax.Array | None


# (parameters [num_outside, ...], x [rows, T, D], their inputs) -> (activations, auxiliary losses)
ApplyLayers = Callable[[Params, jax.Array, LayerInputs], tuple[jax.Array, AuxiliaryLosses]]


class ShardedLayers:
    """All layers outside the pipeline, on a stage's share of the rows.

    Args:
      apply: function that runs them on any rows, differentiable in its first two arguments.
      trained: function that returns parameters with None for frozen ones.
    """

    def __init__(
        self, apply: ApplyLayers, trained: Callable[[Params], Params] = lambda weights: weights
    ):
        self._apply = apply
        self._trained = trained

    def __call__(
        self, weights: Params, x: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, AuxiliaryLosses]:
        """Apply the layers to this stage's rows [R, T, D]; auxiliary losses are summed."""
        num_rows, share = inputs.side.positions.shape[0], x.shape[0]
        # [B, ...] -> [R, ...]
        side = jax.tree.map(own_share, inputs.side)
        if num_rows == share * lax.axis_size("stage"):
            return self._apply(weights, x, LayerInputs(side, inputs.key))

        # Some stages have rows of padding, whose auxiliary losses do not count.
        def row(x: jax.Array, side: SideInputs) -> tuple[jax.Array, AuxiliaryLosses]:
            side_of_row = jax.tree.map(lambda a: a[None], side)
            y, aux = self._apply(weights, x[None], LayerInputs(side_of_row, inputs.key))
            return y[0], aux

        y, aux = jax.vmap(row)(x, side)
        is_row = lax.axis_index("stage") * share + jnp.arange(share) < num_rows
        return y, sum_where(is_row, aux)

    def forward(
        self, weights: Params, x: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, AuxiliaryLosses]:
        """Apply the layers to a microbatch [B, T, D] that every stage has, and so their result.

        Auxiliary losses are those of this stage's share.
        """
        y, aux = self(weights, own_share(x), inputs)
        return joined_shares(y, x.shape[0]), aux

    def gradients(
        self,
        weights: Params,
        x: jax.Array,
        inputs: LayerInputs,
        dy: jax.Array,
        aux_scale: jax.Array,
    ) -> tuple[jax.Array, Params]:
        """Compute `forward` again, and its backward.

        Args:
          dy: gradient of its activations [B, T, D]; only stage 0's counts.
          aux_scale: float32 scalar, the gradient of each auxiliary loss.

        Returns:
          (gradient for x [B, T, D] on every stage, gradients for `weights` of this share, None
          where frozen).
        """

        # Nothing was stored in the tick of the forward, so it is computed again.
        def forward(moving: Params, x: jax.Array) -> tuple[jax.Array, AuxiliaryLosses]:
            return self(with_trainable(weights, moving), x, inputs)

        (_, aux), vjp = jax.vjp(forward, self._trained(weights), own_share(x))
        daux = jax.tree.map(lambda a: jnp.full_like(a, aux_scale), aux)
        # The gradient that leaves the first chunk is on stage 0 alone; all need rows of it.
        weight_gradients, dx = vjp((share_from(dy, source=0), daux))
        return joined_shares(dx, x.shape[0]), weight_gradients
