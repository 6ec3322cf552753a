"""The two ends of the model inside the manual program: embedding and head, their work spread over the stages.

Computed on the first and last stage alone they would dominate the tick at real vocabularies, and so
would their weights. Letters: S stages, B sequences of a microbatch on one data shard, T sequence, D
embed, N = B * T tokens.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from maxpipe.model.parameters import Params
from maxpipe.pipeline.manual import BATCH_AXES, manual_part

HeadLoss = Callable[[Params, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Embedding:
    """Lookup in a table [V, D] whose columns are spread over devices, without ever gathering the table.

    Every device looks up its columns for the tokens of all the devices that it shares the table
    with; then rows and columns change places. That moves activations of one microbatch instead of a
    vocabulary, and the gradient of a table column arises where the column lives.

    Args:
      spec: PartitionSpec of the table; its rows are whole.
      dtype: dtype of activations.
    """

    def __init__(self, spec: PartitionSpec, dtype: Any):
        columns = (*manual_part(spec), None, None)[1]
        self._axes = columns if isinstance(columns, tuple) else (columns,) if columns else ()
        self._dtype = dtype

    def lookup(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """Local columns of the table, tokens int32 [B, T] of this data shard -> [B, T, D], on every stage."""
        x = table[self._all_tokens(tokens)].astype(self._dtype)
        for axis in reversed(self._axes):
            if axis in BATCH_AXES:
                x = lax.all_to_all(x, axis, split_axis=0, concat_axis=2, tiled=True)
            else:
                x = lax.all_gather(x, axis, axis=2, tiled=True)
        return x

    def add_gradient(self, total: jax.Array, tokens: jax.Array, gradient: jax.Array) -> jax.Array:
        """Adds to the local columns' gradient.

        Args:
          total: float32, like the local columns of the table.
          tokens: int32 [B, T] of this data shard.
          gradient: [B, T, D] with respect to `lookup`'s result; that of stage 0 counts.
        """
        for axis in self._axes:
            if axis in BATCH_AXES:
                gradient = lax.all_to_all(gradient, axis, split_axis=2, concat_axis=0, tiled=True)
            else:
                gradient = _deal(jnp.moveaxis(gradient, 2, 0), source=0)
                gradient = jnp.moveaxis(gradient, 0, 2)
        if "stage" not in self._axes:
            gradient = jnp.where(lax.axis_index("stage") == 0, gradient, 0)
        return total.at[self._all_tokens(tokens)].add(gradient.astype(jnp.float32))

    def _all_tokens(self, tokens: jax.Array) -> jax.Array:
        # Not in reverse, so that the outermost rows are those of the axis that `lookup` exchanges
        # first.
        for axis in self._axes:
            if axis in BATCH_AXES:
                tokens = lax.all_gather(tokens, axis, axis=0, tiled=True)
        return tokens


class Head:
    """Loss of the last stage's output: its tokens are dealt out, and every stage does the S-th part of the head.

    Args:
      head_loss: (outer parameters, x [P,D], targets [P], weights [P]) -> (loss sum, cross-entropy
        sum), differentiable in the first two.
      num_stages: S.
    """

    def __init__(self, head_loss: HeadLoss, num_stages: int):
        self._head_loss = head_loss
        self._num_stages = num_stages

    def share(
        self, y: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """This stage's tokens of the last stage's output.

        Args:
          y: [B, T, D]; that of the last stage counts.
          targets, weights: [B, T].

        Returns:
          ([P, D], [P], [P]), P = ceil(N / S); tokens beyond N have weight 0.
        """
        mine = lax.axis_index("stage")
        x = _deal(self._padded(y.reshape(-1, y.shape[-1])), source=self._num_stages - 1)
        my_targets, my_weights = (
            self._padded(a.reshape(-1)).reshape(self._num_stages, -1)[mine]
            for a in (targets, weights)
        )
        return x, my_targets, my_weights

    def losses(
        self, outer: Params, y: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """(loss sum, cross-entropy sum) of this stage's share."""
        return self._head_loss(outer, *self.share(y, targets, weights))

    def losses_and_gradients(
        self, outer: Params, y: jax.Array, targets: jax.Array, weights: jax.Array, scale: jax.Array
    ) -> tuple[jax.Array, jax.Array, Params]:
        """Loss and gradients of this microbatch.

        Args:
          outer: what `head_loss` takes as parameters.
          y, targets, weights: as in `share`.
          scale: float32 scalar that multiplies the loss before differentiation.

        Returns:
          (loss sum of this stage's share, gradient for y [B, T, D], gradients for `outer` of this
          share).
        """
        x, targets, weights = self.share(y, targets, weights)
        loss, vjp = jax.vjp(
            lambda outer, x: self._head_loss(outer, x, targets, weights)[0], outer, x
        )
        outer_gradient, x_gradient = vjp(scale)
        gradient = lax.all_gather(x_gradient, "stage", axis=0, tiled=True)
        tokens = y.shape[0] * y.shape[1]
        return loss, gradient[:tokens].reshape(y.shape), outer_gradient

    def _padded(self, flat: jax.Array) -> jax.Array:
        missing = -flat.shape[0] % self._num_stages
        return jnp.pad(flat, [(0, missing)] + [(0, 0)] * (flat.ndim - 1))


def _deal(x: jax.Array, source: int) -> jax.Array:
    """Part s of stage `source`'s [S * P, ...] to every stage s: [P, ...]."""
    size = lax.axis_size("stage")
    if size == 1:
        return x
    parts = x.reshape(size, -1, *x.shape[1:])
    return lax.all_to_all(parts, "stage", split_axis=0, concat_axis=0)[source]
