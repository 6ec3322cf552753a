"""Lay out the layers that run outside the pipeline: at rest in rows, for use by their dimensions.

At rest they are the last E rows of live layer parameters, [V + E, S, L, ...] (see `layout`), which
lie over the stages. For use every layer is split by its own dimensions instead, as embedding and
head are, so that any device can gather one layer without its neighbours. Letters: see
`maxpipe.pipeline`.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxpipe.model.parameters import Params, ParamSpec, map_specs, outer_axes
from maxpipe.pipeline.layout import LAYER_AXES, StageLayout
from maxpipe.sharding.rules import AxisRules


def spec_for_use(rules: AxisRules, spec: ParamSpec) -> PartitionSpec:
    """Return how one layer's parameter lies for use, without a layer dimension."""
    return rules.spec(outer_axes(spec), spec.shape)


def for_use(rules: AxisRules, layout: StageLayout, specs: Params, layers: Params) -> Params:
    """Return the layers outside the pipeline, [num_outside, ...], of live ones [V + E, S, L, ...].

    Args:
      rules: logical axis rules.
      layout: the assignment of layers to stages.
      specs: the `ParamSpec`s of one layer.
      layers: live parameters.
    """

    def split_by_dimensions(spec: ParamSpec, leaf: jax.Array) -> jax.Array:
        axes = (None, None, None, *outer_axes(spec))
        rows = rules.constrain(leaf[layout.num_repeats :], axes)  # [E, S, L, ...]
        # [E, S, L, ...] -> [E S L, ...], layers first and then padding
        return rows.reshape(-1, *spec.shape)[: layout.num_outside]

    return map_specs(split_by_dimensions, specs, layers)


def with_outside(
    rules: AxisRules, layout: StageLayout, specs: Params, layers: Params, outside: Params
) -> Params:
    """Return live layers [V + E, S, L, ...] whose last E rows are `outside` [num_outside, ...].

    Its transpose, up to rows of padding, is `for_use`. It also brings gradients back to the live
    layout; frozen parameters have none there.
    """
    repeats, shape = layout.num_repeats, layout.shape

    def write_rows(
        spec: ParamSpec, leaf: jax.Array | None, part: jax.Array | None
    ) -> jax.Array | None:
        if leaf is None or part is None:
            return None
        outside_rows = shape[0] - repeats, *shape[1:]
        missing = math.prod(outside_rows) - layout.num_outside
        padded = jnp.pad(part, [(0, missing)] + [(0, 0)] * len(spec.shape))
        # [E S L, ...] -> [E, S, L, ...]
        rows = padded.reshape(*outside_rows, *spec.shape)
        at_rest = partial(rules.constrain, axes=(*LAYER_AXES, *spec.axes))
        return at_rest(leaf.at[repeats:].set(at_rest(rows)))

    return map_specs(write_rows, specs, layers, outside)
