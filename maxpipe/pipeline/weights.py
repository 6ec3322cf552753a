"""Live weights: their shardings at rest, and gathering them over the axes that only spread storage."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding

from maxpipe.model.parameters import Params, ParamSpec, map_specs
from maxpipe.sharding.rules import AxisRules, without

# Mesh axes over which a parameter is spread to save memory; compute needs it whole over them.
STORAGE_AXES = ("fsdp", "stage", "context")


class Weights:
    """Shardings of one model's parameters.

    Args:
      rules: logical axis rules.
      specs: {"embed", "layers", "head"} of `ModelProgram`.
      layer_axes, layer_shape: logical axes and sizes of the leading dimensions of live layer
        parameters.
    """

    def __init__(
        self, rules: AxisRules, specs: Any, layer_axes: Sequence[str], layer_shape: Sequence[int]
    ):
        self._rules = rules
        self._specs = specs
        self._layer_axes = tuple(layer_axes)
        self._layer_shape = tuple(layer_shape)

    def shardings(self) -> Params:
        """NamedSharding of every live parameter at rest."""

        def layer(spec: ParamSpec) -> NamedSharding:
            return self._rules.sharding(
                self._layer_axes + spec.axes, self._layer_shape + spec.shape
            )

        def outer(spec: ParamSpec) -> NamedSharding:
            return self._rules.sharding(spec.axes, spec.shape)

        return {
            "embed": map_specs(outer, self._specs["embed"]),
            "layers": map_specs(layer, self._specs["layers"]),
            "head": map_specs(outer, self._specs["head"]),
        }

    def abstract(self) -> Params:
        """Shape, dtype and sharding of every live parameter at rest."""

        def one(
            spec: ParamSpec, sharding: NamedSharding, leading: tuple[int, ...]
        ) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leading + spec.shape, spec.dtype, sharding=sharding)

        shardings, leading = self.shardings(), {"layers": self._layer_shape}
        return {
            n: map_specs(partial(one, leading=leading.get(n, ())), self._specs[n], shardings[n])
            for n in shardings
        }

    def gather_layer(self, layer: Params) -> Params:
        """One layer's parameters, whole over the storage axes; the transpose scatters the gradient again."""
        return map_specs(self._gather, self._specs["layers"], layer)

    def gather_outer(self, params: Params) -> Params:
        """{"embed", "head"} of `params`, whole over the storage axes."""
        return {n: map_specs(self._gather, self._specs[n], params[n]) for n in ("embed", "head")}

    def _gather(self, spec: ParamSpec, p: jax.Array) -> jax.Array:
        target = without(self._rules.spec(spec.axes, spec.shape), STORAGE_AXES)
        return self._rules.lay_out(p, target, spec.axes)
