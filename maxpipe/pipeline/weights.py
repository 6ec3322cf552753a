"""Shard live parameters at rest, and gather them for use over the axes that only split storage."""

import math
from collections.abc import Collection, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from maxpipe.model.parameters import Params, ParamSpec, Tree, map_specs, outer_axes
from maxpipe.pipeline.layout import LAYER_AXES, StageLayout
from maxpipe.pipeline.manual import MANUAL_AXES, Gather
from maxpipe.sharding.collectives import EXPERT_AXIS
from maxpipe.sharding.rules import AxisRules, axes_by_dimension, axes_of, without
from maxpipe.sharding.torus import TORUS_AXIS

# Mesh axes that split a parameter only to save memory: it is gathered over them for use. Expert is
# one of them for parameters without a dimension of experts.
STORAGE_AXES = ("fsdp", "stage", "context", EXPERT_AXIS)


def axes_in_use(rules: AxisRules, spec: ParamSpec) -> set[str]:
    """Return the storage axes over which a parameter is not gathered: those of its experts."""
    return axes_of(rules.spec(("expert",))) if "expert" in spec.axes else set()


def spec_in_use(rules: AxisRules, spec: ParamSpec) -> PartitionSpec:
    """Return the PartitionSpec of a parameter that is gathered over the storage axes."""
    gathered = set(STORAGE_AXES) - axes_in_use(rules, spec)
    return without(rules.spec(spec.axes, spec.shape), gathered)


def gather_of(
    rules: AxisRules,
    spec: ParamSpec,
    dtype: DTypeLike,
    manual: Collection[str] = MANUAL_AXES,
    at_rest: PartitionSpec | None = None,
) -> Gather:
    """Return the gather of a parameter for use, in a program that is manual over some mesh axes.

    `at_rest` is its layout, without leading dimensions, by default that of the rules.
    """
    at_rest = at_rest or rules.spec(spec.axes, spec.shape)
    in_use, used_as = axes_in_use(rules, spec), spec.compute_dtype(dtype)
    return Gather(at_rest, spec.dtype, used_as, manual, in_use=in_use, route=rules.route)


class Weights:
    """Shardings of a model's live parameters, {"embed", "layers", "head"}.

    Live layer parameters have leading dimensions, of which axes and sizes are given.
    """

    def __init__(
        self,
        rules: AxisRules,
        specs: Params,
        layer_axes: Sequence[str],
        layer_shape: Sequence[int],
    ):
        self._rules = rules
        self._specs = specs
        self._layer_axes = tuple(layer_axes)
        self._layer_shape = tuple(layer_shape)

    def shardings(self) -> dict[str, Tree[NamedSharding]]:
        def sharding(
            spec: ParamSpec, *, axes: Sequence[str], shape: Sequence[int]
        ) -> NamedSharding:
            return self._rules.sharding((*axes, *spec.axes), (*shape, *spec.shape))

        outer = partial(sharding, axes=(), shape=())
        layer = partial(sharding, axes=self._layer_axes, shape=self._layer_shape)
        of = {"embed": outer, "layers": layer, "head": outer}
        return {name: map_specs(f, self._specs[name]) for name, f in of.items()}

    def abstract(self) -> dict[str, Tree[jax.ShapeDtypeStruct]]:
        def leaf(
            spec: ParamSpec, sharding: NamedSharding, *, leading: tuple[int, ...]
        ) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leading + spec.shape, spec.dtype, sharding=sharding)

        leading = {"embed": (), "layers": self._layer_shape, "head": ()}
        return {
            name: map_specs(partial(leaf, leading=leading[name]), self._specs[name], shardings)
            for name, shardings in self.shardings().items()
        }

    def gather_layer(self, layer: Params) -> Params:
        """Gather one layer over the storage axes; the transpose scatters its gradient."""
        return map_specs(partial(self._gather, is_outer=False), self._specs["layers"], layer)

    def gather_outer(self, params: Params) -> Params:
        """Gather {"embed", "head"} of `params` over the storage axes."""
        return {
            name: map_specs(partial(self._gather, is_outer=True), self._specs[name], params[name])
            for name in ("embed", "head")
        }

    def _gather(self, spec: ParamSpec, p: jax.Array, *, is_outer: bool) -> jax.Array:
        # XLA's partitioner gathers where the layout asks for less splitting than the operand has.
        # Over manual axes there is nothing left to gather.
        manual = jax.sharding.get_abstract_mesh().manual_axes
        target = without(spec_in_use(self._rules, spec), manual)
        if self._rules.route.line > 1 and not manual:
            at_rest = self._rules.spec(spec.axes, spec.shape)
            is_along = TORUS_AXIS in axes_of(at_rest) - axes_of(target)
            if is_along and _gathers_minor_axes(at_rest, target):
                # An embedding's gradient is split before it is summed; a layer's is laid out as
                # for any other gather, which moves less.
                gradient = at_rest if is_outer else target
                return self._gather_in_two_steps(spec, p, at_rest, target, gradient)
        return self._rules.lay_out(p, target, spec.axes)

    def _gather_in_two_steps(
        self,
        spec: ParamSpec,
        p: jax.Array,
        at_rest: PartitionSpec,
        target: PartitionSpec,
        gradient: PartitionSpec,
    ) -> jax.Array:
        """Gather along lines of a torus and then across them, by hand-written collectives.

        The partitioner sums the gradient, into the layout `gradient`.
        """
        mesh, route = self._rules.mesh, self._rules.route
        gather = Gather(
            at_rest, p.dtype, p.dtype, mesh.axis_names, in_use=axes_of(target), route=route
        )
        on_parts = jax.shard_map(
            gather.gather, mesh=mesh, in_specs=at_rest, out_specs=target, check_vma=False
        )
        gathered = jax.custom_vjp(lambda p: on_parts(p))
        gathered.defvjp(
            lambda p: (on_parts(p), None),
            lambda _, ct: (self._rules.lay_out(ct, gradient, spec.axes),),
        )
        return gathered(p)


def _gathers_minor_axes(at_rest: PartitionSpec, target: PartitionSpec) -> bool:
    """Return whether shards that are gathered are next to each other in every dimension."""
    dimensions = zip(axes_by_dimension(at_rest), axes_by_dimension(target), strict=True)
    return all(axes[: len(kept)] == kept for axes, kept in dimensions)


def spec_for_use(rules: AxisRules, spec: ParamSpec) -> PartitionSpec:
    """Return how one layer's parameter lies for use, without a layer dimension."""
    return rules.spec(outer_axes(spec), spec.shape)


def for_use(rules: AxisRules, layout: StageLayout, specs: Params, layers: Params) -> Params:
    """Return the layers outside the pipeline, [num_outside, ...], of live ones [V + E, S, L, ...].

    At rest they are the last E rows (see `layout`), which lie over the stages. For use every layer
    is split by its own dimensions instead, as embedding and head are, so that any device can gather
    one layer without its neighbours.
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
