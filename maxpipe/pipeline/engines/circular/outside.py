"""Layers outside the circular pipeline: the stages compute the same layers, each on its share of the microbatches.

That is data parallelism over the mesh axis `stage`, and over it these layers' parameters are spread
as well, like those of embedding and head. Letters: S stages, K = M / S microbatches for each, V
repeats, E rows of parameters outside, L layers per stage, B sequences of a microbatch, T sequence,
D embed, n layers outside.
"""

from typing import Any

import jax
import jax.numpy as jnp

from maxpipe.config.sections import PipelineConfig
from maxpipe.model.parameters import Params, ParamSpec, map_specs
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.chunk import apply_layers, layer_function
from maxpipe.pipeline.layout import StageLayout
from maxpipe.pipeline.remat import checkpoint, remat_policy
from maxpipe.pipeline.weights import Weights
from maxpipe.sharding.rules import AxisRules

# At rest rows of layers lie over the stages; for use each layer does, so that they can be gathered
# one by one.
SPREAD = {"embed": "outer_embed"}


class OutsideLayers:
    """The layers of a `StageLayout` that are not in its chunks.

    Args:
      program, rules, config, layout, weights: as the pipeline has them.
    """

    def __init__(
        self,
        program: ModelProgram,
        rules: AxisRules,
        config: PipelineConfig,
        layout: StageLayout,
        weights: Weights,
    ):
        self._program, self._rules, self._layout, self._weights = program, rules, layout, weights
        self._scan = config.scan_layers_per_stage
        self._kept = remat_policy(config)

    def __call__(
        self, layers: Params, io: jax.Array, side: Any, key: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Applies the layers to all microbatches.

        Args:
          layers: live parameters [V + E, S, L, ...].
          io: activations [S, K, B, T, D].
          side: side inputs [S, K, B, ...].
          key: key of the step or None.

        Returns:
          (activations like `io`, auxiliary loss summed over layers and sequences).
        """
        index = jnp.asarray(self._layout.outside_index)
        rows = map_specs(self._spread, self._program.specs["layers"], layers)
        x, side = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), (io, side))
        # Kept of a layer: the input and what the policy says of each microbatch; the gathered
        # weights are not.
        layer = checkpoint(self._layer, self._kept)
        x, aux = apply_layers(layer, rows, index, x, side, key, scan=self._scan)
        return jnp.swapaxes(x, 0, 1), aux

    def _spread(self, spec: ParamSpec, leaf: jax.Array) -> jax.Array:
        """[V + E, S, L, ...] -> the rows outside, [n, ...], spread over the stages by the layers' own dimensions."""
        axes = (None, None, None, *(SPREAD.get(axis, axis) for axis in spec.axes))
        rows = self._rules.constrain(leaf[self._layout.num_repeats :], axes)
        return rows.reshape(-1, *spec.shape)[: self._layout.num_outside]

    def _layer(
        self, layer: Params, index: jax.Array, x: jax.Array, side: Any, key: Any
    ) -> tuple[jax.Array, jax.Array]:
        """One layer on [K, S, B, T, D], its weights gathered once."""
        weights = self._weights.gather_layer(self._program.cast(layer))
        apply = checkpoint(layer_function(self._program, lambda p: p, padded=False), self._kept)
        over_stages = jax.vmap(
            apply,
            in_axes=(None, None, 0, 0, None),
            spmd_axis_name=self._rules.spec(("activation_stage",))[0],
        )

        def microbatch(total: jax.Array, xs: Any) -> tuple[jax.Array, jax.Array]:
            y, aux = over_stages(weights, index, *xs, key)
            return total + jnp.sum(aux), y

        total, y = jax.lax.scan(microbatch, jnp.zeros(()), (x, side))
        return y, total
