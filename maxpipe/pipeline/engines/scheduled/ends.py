"""Compute the two ends of the model, embedding and head, spread over the stages.

On the first and the last stage alone they would dominate the tick at real vocabularies, and their
weights would dominate memory. Both run inside the manual program. Letters: S stages, B sequences of
a microbatch on one data shard, T tokens of each, D embed, V vocabulary, P = ceil(B * T / S) tokens
of a stage's share.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from maxpipe.model.layers import AuxiliaryLosses
from maxpipe.model.parameters import Params, with_trainable
from maxpipe.pipeline.engines.scheduled.outside import LayerInputs, ShardedLayers
from maxpipe.pipeline.manual import BATCH_AXES, joined_shares, manual_part, own_share, share_from

HeadLoss = Callable[[Params, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class ShardedEmbedding:
    """Lookup in a table [V, D] whose columns are spread over devices, without gathering the table.

    Every device looks up its columns for the tokens of all the devices that it shares the table
    with; then rows and columns change places. That moves activations of one microbatch instead of a
    vocabulary, and the gradient of a table column arises where the column lives.

    An example with D = 4 columns over fsdp = 2 and B = 2: device 0 has columns 0-1 and the tokens
    of rows 0-1, device 1 has columns 2-3 and the tokens of rows 2-3. Each gathers the tokens of all
    four rows and looks up its two columns, [4, T, 2]; the all_to_all splits rows and joins columns,
    [2, T, 4].

    Args:
      spec: PartitionSpec of the table; no manual axis splits its rows.
      dtype: dtype of activations.
      scale: function that multiplies rows of the table by a constant, element by element.
    """

    def __init__(
        self,
        spec: PartitionSpec,
        dtype: DTypeLike,
        scale: Callable[[jax.Array], jax.Array] = lambda x: x,
    ):
        columns = (*manual_part(spec), None, None)[1]
        self._axes = columns if isinstance(columns, tuple) else (columns,) if columns else ()
        self._dtype = dtype
        self._scale = scale

    def lookup(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return the embedding of this shard's tokens [B, T], [B, T, D] on every stage.

        The table is this device's columns, [V, D / devices].
        """
        x = self._scale(table[self._all_tokens(tokens)].astype(self._dtype))
        for axis in reversed(self._axes):
            if axis in BATCH_AXES:
                # [n*B, T, D/n] -> [B, T, D], n devices of the axis.
                x = lax.all_to_all(x, axis, split_axis=0, concat_axis=2, tiled=True)
            else:
                # Along the stage axis all devices have the same tokens: [B, T, D/n] -> [B, T, D].
                x = lax.all_gather(x, axis, axis=2, tiled=True)
        return x

    def add_gradient(self, total: jax.Array, tokens: jax.Array, gradient: jax.Array) -> jax.Array:
        """Return the local columns' gradient with a microbatch's gradient added.

        Args:
          total: float32, shaped like the local columns of the table.
          gradient: gradient of `lookup`'s result, [B, T, D]; only stage 0's counts.
        """
        gradient = self._scale(gradient)
        for axis in self._axes:
            if axis in BATCH_AXES:
                # [B, T, D] -> [n*B, T, D/n]
                gradient = lax.all_to_all(gradient, axis, split_axis=2, concat_axis=0, tiled=True)
            else:
                # [B, T, D] -> [D, B, T] -> [D/S, B, T] -> [B, T, D/S]
                gradient = share_from(jnp.moveaxis(gradient, 2, 0), source=0)
                gradient = jnp.moveaxis(gradient, 0, 2)
        if "stage" not in self._axes:
            gradient = jnp.where(lax.axis_index("stage") == 0, gradient, 0)
        return total.at[self._all_tokens(tokens)].add(gradient.astype(jnp.float32))

    def _all_tokens(self, tokens: jax.Array) -> jax.Array:
        """Return the tokens of all devices that share the table, [B, T] -> [n*B, T]."""
        # In the order of the axes, which `lookup` exchanges in reverse: the axis gathered last has
        # the outermost rows, and its exchange comes first.
        for axis in self._axes:
            if axis in BATCH_AXES:
                tokens = lax.all_gather(tokens, axis, axis=0, tiled=True)
        return tokens


class ShardedHead:
    """Loss of the last stage's output: every stage runs the head on its share of the tokens.

    Layers after the pipeline come before the head. They see whole sequences, so a stage's share is
    then made of rows.

    Args:
      head_loss: (outer parameters, x [P, D], targets [P], weights [P]) -> (loss sum, cross-entropy
        sum), differentiable in the first two.
      layers: the layers after the pipeline, if any; their parameters are `outer["outside"]`.
      trained: function that returns outer parameters with None for frozen ones.
    """

    def __init__(
        self,
        head_loss: HeadLoss,
        num_stages: int,
        layers: ShardedLayers | None = None,
        trained: Callable[[Params], Params] = lambda outer: outer,
    ):
        self._head_loss = head_loss
        self._trained = trained
        self._num_stages = num_stages
        self._layers = layers

    def share(
        self, y: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return this stage's share of the last stage's output, of targets and of weights.

        [B, T, D], [B, T], [B, T] -> [P, D], [P], [P], with layers [R, T, D], [R, T], [R, T] of
        R = ceil(B / S) rows. Only the last stage's y counts; padding tokens have weight 0.
        """
        if self._layers is None:
            # [B, T, D] -> [B*T, D], [B, T] -> [B*T]
            y, targets, weights = y.reshape(-1, y.shape[-1]), targets.ravel(), weights.ravel()
        # The targets are on every stage.
        x = share_from(y, source=self._num_stages - 1)
        return x, own_share(targets), own_share(weights)

    def losses(
        self,
        outer: Params,
        y: jax.Array,
        targets: jax.Array,
        weights: jax.Array,
        inputs: LayerInputs | None = None,
    ) -> tuple[jax.Array, jax.Array, AuxiliaryLosses]:
        """Return sums of this stage's share: (loss, cross-entropy, auxiliary losses)."""
        return self._share_losses(outer, *self.share(y, targets, weights), inputs)

    def losses_and_gradients(
        self,
        outer: Params,
        y: jax.Array,
        targets: jax.Array,
        weights: jax.Array,
        scales: tuple[jax.Array, jax.Array],
        inputs: LayerInputs | None = None,
    ) -> tuple[tuple[jax.Array, AuxiliaryLosses], jax.Array, Params]:
        """Return losses and gradients of a microbatch.

        Args:
          outer: what `head_loss` takes as parameters, and those of `layers`.
          scales: float32 scalars that multiply loss and auxiliary losses before differentiation.

        Returns:
          (sums (loss, auxiliary losses) of this stage's share, gradient for y [B, T, D], gradients
          for `outer` of this share, None where frozen).
        """
        x, targets, weights = self.share(y, targets, weights)

        def losses(moving: Params, x: jax.Array) -> tuple[jax.Array, AuxiliaryLosses]:
            params = with_trainable(outer, moving)
            loss, _, aux = self._share_losses(params, x, targets, weights, inputs)
            return loss, aux

        sums, vjp = jax.vjp(losses, self._trained(outer), x)
        daux = jax.tree.map(lambda a: jnp.full_like(a, scales[1]), sums[1])
        outer_gradient, x_gradient = vjp((scales[0], daux))
        # [P, D] -> [B*T, D] -> [B, T, D], or [R, T, D] -> [B, T, D]
        num = y.shape[0] if self._layers else y.shape[0] * y.shape[1]
        return sums, joined_shares(x_gradient, num).reshape(y.shape), outer_gradient

    def _share_losses(
        self,
        outer: Params,
        x: jax.Array,
        targets: jax.Array,
        weights: jax.Array,
        inputs: LayerInputs | None,
    ) -> tuple[jax.Array, jax.Array, AuxiliaryLosses]:
        aux: AuxiliaryLosses = {}
        if self._layers is not None:
            assert inputs is not None
            x, aux = self._layers(outer["outside"], x, inputs)
            # [R, T, D] -> [P, D]
            x, targets, weights = x.reshape(-1, x.shape[-1]), targets.ravel(), weights.ravel()
        return *self._head_loss(outer, x, targets, weights), aux
