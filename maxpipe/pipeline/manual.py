"""Weights inside a manual `shard_map`: gathering them, and summing their gradients, over named mesh axes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from maxpipe.model.parameters import Params
from maxpipe.sharding.context_parallel import AXIS
from maxpipe.sharding.rules import only

ROW_AXES = ("data", "fsdp")
BATCH_AXES = (*ROW_AXES, AXIS)  # axes along which each device has its own tokens
# Axes over which the scheduled engine's program is written by hand; the partitioner has the others.
MANUAL_AXES = ("stage", *BATCH_AXES)

Array2Array = Callable[[jax.Array], jax.Array]


def manual_part(spec: PartitionSpec) -> PartitionSpec:
    """A PartitionSpec reduced to the manual axes."""
    return only(spec, MANUAL_AXES)


class Gather:
    """Gathers one parameter over the manual axes that spread it, and takes its gradient back.

    Args:
      spec: the parameter's PartitionSpec, without leading layer dimensions.
      param_dtype: dtype in which it is kept.
      dtype: dtype in which it is gathered and used.
    """

    def __init__(self, spec: PartitionSpec, param_dtype: Any, dtype: Any):
        self._dtype = dtype
        self._spec = spec
        self._dims: list[tuple[int, tuple[str, ...]]] = []
        for dim, entry in enumerate(manual_part(spec)):
            if entry is not None:
                self._dims.append((dim, entry if isinstance(entry, tuple) else (entry,)))
        self.axes = {axis for _, axes in self._dims for axis in axes}
        self._differentiable = jax.custom_vjp(lambda shard: self.whole(shard))
        self._differentiable.defvjp(
            lambda shard: (self.whole(shard), None),
            lambda _, gradient: (self.scatter(gradient).astype(param_dtype),),
        )

    def __call__(self, shard: jax.Array) -> jax.Array:
        """The whole parameter in `dtype`; differentiable: the gradient is summed in float32 and scattered."""
        return self._differentiable(shard)

    def whole(self, shard: jax.Array, leading: tuple[str | None, ...] = ()) -> jax.Array:
        """As `__call__`, without a gradient of its own.

        Args:
          shard: may have leading layer dimensions.
          leading: for each of them the partitioner's mesh axis that splits it, or None.
        """
        x = shard.astype(self._dtype) if jnp.issubdtype(shard.dtype, jnp.floating) else shard

        def gather(x: jax.Array) -> jax.Array:
            for dim, axes in self._dims:
                for axis in reversed(axes):
                    x = lax.all_gather(x, axis, axis=dim + len(leading), tiled=True)
            return x

        return self._partwise(gather, leading)(x)

    def scatter(self, gradient: jax.Array, leading: tuple[str | None, ...] = ()) -> jax.Array:
        """Sums a whole parameter's gradient over the axes that spread it; each device keeps its shard, float32.

        Leading layer dimensions as in `whole`.
        """
        # Sums are float32 for accuracy; bfloat16 ones also abort XLA's CPU backend in partially
        # manual programs.
        x = gradient.astype(jnp.float32)

        def reduce(x: jax.Array) -> jax.Array:
            for dim, axes in self._dims:
                for axis in axes:
                    x = lax.psum_scatter(x, axis, scatter_dimension=dim + len(leading), tiled=True)
            return x

        return self._partwise(reduce, leading)(x)

    def _partwise(self, f: Array2Array, leading: tuple[str | None, ...]) -> Array2Array:
        """`f` on each device's part over the partitioner's axes.

        The partitioner does not split the operand of a collective written by hand: it would gather
          it first.
        """
        mesh = jax.sharding.get_abstract_mesh()
        # All of them: XLA of jax 0.12 ends the process where some are left to the partitioner, even
        # of size one.
        automatic = {axis for axis in mesh.axis_names if axis not in mesh.manual_axes}
        spec = only(PartitionSpec(*leading, *self._spec), automatic)
        if not self._dims or not any(spec):
            return f
        return jax.shard_map(
            f, in_specs=spec, out_specs=spec, axis_names=automatic, check_vma=False
        )


def map_gathers(f: Callable[..., Any], gathers: Any, *trees: Any) -> Any:
    """`jax.tree.map` over a tree of `Gather`s."""
    return jax.tree.map(f, gathers, *trees, is_leaf=lambda x: isinstance(x, Gather))


def gather_tree(gathers: Any, params: Params) -> Params:
    """Every parameter whole, differentiable."""
    return map_gathers(lambda g, p: g(p), gathers, params)


def sum_replicas(gathers: Any, gradients: Params, axes: tuple[str, ...]) -> Params:
    """Sums gradients over those of `axes` that do not spread the parameter (over the others they were scattered)."""

    def one(gather: Gather, g: jax.Array) -> jax.Array:
        return psum(g, tuple(a for a in axes if a not in gather.axes))

    return map_gathers(one, gathers, gradients)


def psum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`lax.psum` over those of `axes` that have more than one device.

    Sums over one device each, where only automatic axes have several, fail in XLA's partitioner.
    """
    several = tuple(a for a in axes if lax.axis_size(a) > 1)
    return lax.psum(x, several) if several else x


def ring(x: Any, size: int, shift: int) -> Any:
    """Every stage's arrays to the stage `shift` places on."""
    if size == 1:
        return x
    pairs = [(s, (s + shift) % size) for s in range(size)]
    return jax.tree.map(partial(lax.ppermute, axis_name="stage", perm=pairs), x)
