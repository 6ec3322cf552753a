"""Run layers outside the circular pipeline: every stage runs them on its own microbatches.

That is data parallelism over the mesh axis `stage`. These layers' parameters are split over that
axis as well, like those of embedding and head. Letters: see `maxpipe.pipeline`.
"""

from functools import partial

import jax
import jax.numpy as jnp

from maxpipe.config.sections import PipelineConfig
from maxpipe.model.layers import AuxiliaryLosses, SideInputs
from maxpipe.model.parameters import Params
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.chunk import (
    Function,
    apply_first_layers,
    apply_layers,
    checkpoint,
    layer_function,
    remat_policy,
)
from maxpipe.pipeline.layout import StageLayout
from maxpipe.pipeline.weights import Weights, for_use
from maxpipe.sharding.rules import AxisRules


class OutsideLayers:
    def __init__(
        self,
        program: ModelProgram,
        rules: AxisRules,
        config: PipelineConfig,
        layout: StageLayout,
        weights: Weights,
    ):
        self._program = program
        self._rules = rules
        self._layout = layout
        self._weights = weights
        self._scan = config.scan_layers_per_stage
        self._policy = remat_policy(config)

    def __call__(
        self, layers: Params, io: jax.Array, side: SideInputs, key: jax.Array | None
    ) -> tuple[jax.Array, AuxiliaryLosses]:
        """Apply the layers, live parameters [V + E, S, L, ...], to io [S, K, B, T, D].

        Side inputs are [S, K, B, ...]; auxiliary losses are summed over layers and sequences.
        """
        index = jnp.asarray(self._layout.outside_index)
        rows = for_use(self._rules, self._layout, self._program.specs["layers"], layers)
        # [S, K, B, ...] -> [K, S, B, ...]
        x, side = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), (io, side))
        # A layer saves its input, and for each microbatch what the policy names; it does not save
        # gathered weights.
        layer = checkpoint(self._layer, self._policy)
        x, aux = apply_layers(layer, rows, index, x, side, key, scan=self._scan)
        return jnp.swapaxes(x, 0, 1), aux  # [S, K, B, T, D]

    def first(
        self, layers: Params, io: jax.Array, side: SideInputs, key: jax.Array | None
    ) -> jax.Array:
        """Apply the first dense layers, already gathered, to all microbatches; see `__call__`."""

        def apply(
            layers: Params, x: jax.Array, side: SideInputs, key: jax.Array | None
        ) -> jax.Array:
            policy = self._policy
            return apply_first_layers(self._program, layers, lambda p: p, policy, x, side, key)

        over_stages = self._over_stages(apply, (None, 0, 0, None))

        def slot(_: None, xs: tuple[jax.Array, SideInputs]) -> tuple[None, jax.Array]:
            return None, over_stages(layers, *xs, key)  # [S, B, T, D]

        # [S, K, B, ...] -> [K, S, B, ...]
        _, y = jax.lax.scan(slot, None, jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), (io, side)))
        return jnp.swapaxes(y, 0, 1)

    def _over_stages(self, f: Function, in_axes: tuple[int | None, ...]) -> Function:
        axis = self._rules.spec(("activation_stage",))[0]
        return jax.vmap(f, in_axes=in_axes, spmd_axis_name=axis)

    def _layer(
        self,
        layer: Params,
        index: jax.Array,
        x: jax.Array,
        side: SideInputs,
        key: jax.Array | None,
    ) -> tuple[jax.Array, AuxiliaryLosses]:
        """Apply one layer to [K, S, B, T, D], its weights gathered once for all K slots."""
        weights = self._weights.gather_layer(self._program.cast(layer))
        apply = checkpoint(layer_function(self._program, lambda p: p, padded=False), self._policy)
        over_stages = self._over_stages(apply, (None, None, 0, 0, None))

        def slot(
            carry: None, xs: tuple[jax.Array, SideInputs]
        ) -> tuple[None, tuple[jax.Array, AuxiliaryLosses]]:
            return None, over_stages(weights, index, *xs, key)  # [S, B, T, D], [S] each

        _, (y, of_slots) = jax.lax.scan(slot, None, (x, side))
        return y, jax.tree.map(partial(jnp.sum, axis=(0, 1)), of_slots)
