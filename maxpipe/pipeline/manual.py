"""Gather weights, sum gradients and send activations along a ring, inside `shard_map`.

Such a program is manual over named mesh axes: arrays are one device's parts, and transfers between
devices are explicit. Over all other mesh axes XLA's partitioner works as elsewhere.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from maxpipe.model.parameters import Params
from maxpipe.sharding.collectives import CONTEXT_AXIS, EXPERT_AXIS
from maxpipe.sharding.rules import axes_by_dimension, axes_of, only, without
from maxpipe.sharding.torus import ONE_SLICE, Route, gather_dimension, scatter_dimension

ROW_AXES = ("data", "fsdp", EXPERT_AXIS)
BATCH_AXES = (*ROW_AXES, CONTEXT_AXIS)  # axes along which each device has its own tokens
# Axes over which the scheduled engine's program is manual; the partitioner handles the others.
MANUAL_AXES = ("stage", *BATCH_AXES)

ArrayFunction = Callable[..., jax.Array]
Tree = TypeVar("Tree")  # an array or a pytree of arrays


def manual_part(spec: PartitionSpec) -> PartitionSpec:
    return only(spec, MANUAL_AXES)


def is_manual(mesh: Mesh) -> bool:
    """Return whether only the stage and batch axes have several devices.

    XLA's partitioner then splits nothing within a layer.
    """
    return all(size == 1 for axis, size in mesh.shape.items() if axis not in MANUAL_AXES)


def automatic_axes() -> set[str]:
    """Return the mesh axes that a manual program leaves to the partitioner, for one inside it.

    The inner program must be manual over all of them, even those of size one: XLA of jax 0.12
    aborts the process otherwise.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return {axis for axis in mesh.axis_names if axis not in mesh.manual_axes}


class Gather:
    """Gather of one parameter over the manual axes that split it, and scatter of its gradient.

    Called with this device's shard it returns the full parameter, differentiably; `gather` and
    `scatter` are the two halves, for programs with a hand-written backward.

    Args:
      spec: the parameter's PartitionSpec, without leading layer dimensions.
      param_dtype, dtype: dtypes in which it is stored, and gathered and used.
      manual: mesh axes over which the program is manual.
      in_use: mesh axes that split the parameter in use as well; it is not gathered over them.
      route: the machine's network, which decides the steps of gathers and scatters.

    Attributes:
      axes: the manual axes that split it.
      gathered_axes: the axes over which it is gathered.
    """

    def __init__(
        self,
        spec: PartitionSpec,
        param_dtype: DTypeLike,
        dtype: DTypeLike,
        manual: Collection[str] = MANUAL_AXES,
        *,
        in_use: Collection[str] = (),
        route: Route = ONE_SLICE,
    ):
        self._dtype = dtype
        self._route = route
        self.spec = spec
        self.axes = axes_of(only(spec, manual))
        gathered = axes_by_dimension(without(only(spec, manual), in_use))
        self._dims = [(dim, axes) for dim, axes in enumerate(gathered) if axes]
        self.gathered_axes = {axis for _, axes in self._dims for axis in axes}
        self._differentiable = jax.custom_vjp(lambda shard: self.gather(shard))
        self._differentiable.defvjp(
            lambda shard: (self.gather(shard), None),
            lambda _, gradient: (self.scatter(gradient).astype(param_dtype),),
        )

    def __call__(self, shard: jax.Array) -> jax.Array:
        """Return the full parameter in `dtype`; its gradient is summed in float32 and scattered."""
        return self._differentiable(shard)

    def gather(self, shard: jax.Array, leading: Sequence[str | None] = ()) -> jax.Array:
        """Return the full parameter, [..., n, ...] -> [..., n * devices, ...]; not differentiable.

        Args:
          shard: this device's part, with any number of leading layer dimensions.
          leading: for each of these dimensions the partitioner's mesh axis that splits it, or None.
        """
        x = shard.astype(self.dtype_of(shard))

        def gather(x: jax.Array) -> jax.Array:
            for dim, axes in self._dims:
                x = gather_dimension(x, axes, dim + len(leading), self._route)
            return x

        return self._on_parts(gather, leading)(x)

    def dtype_of(self, shard: jax.Array | jax.ShapeDtypeStruct) -> DTypeLike:
        """Return the dtype in which a parameter is gathered: integers stay as they are."""
        return self._dtype if jnp.issubdtype(shard.dtype, jnp.floating) else shard.dtype

    def gather_in_steps(self, shard: jax.Array) -> jax.Array:
        """Return what `gather` returns for a shard without leading dimensions, in steps.

        Shards go from neighbour to neighbour. TPU compilers run such transfers while other
        operations compute, but not an all-gather.
        """

        def gather(x: jax.Array) -> jax.Array:
            for dim, axes in self._dims:
                for axis in reversed(axes):
                    x = _gather_in_steps(x, axis, dim)
            return x

        return self._on_parts(gather)(shard.astype(self.dtype_of(shard)))

    def scatter(self, gradient: jax.Array, leading: Sequence[str | None] = ()) -> jax.Array:
        """Sum a full parameter's gradient over the axes that split it; return this device's shard.

        Float32, [..., n * devices, ...] -> [..., n, ...]; leading dimensions as in `gather`.
        """
        # Sums are float32 for accuracy; bfloat16 ones also abort XLA's CPU backend in partially
        # manual programs.
        x = gradient.astype(jnp.float32)

        def reduce(x: jax.Array) -> jax.Array:
            for dim, axes in self._dims:
                x = scatter_dimension(x, axes, dim + len(leading), self._route)
            return x

        return self._on_parts(reduce, leading)(x)

    def scatter_in_steps(self, gradient: jax.Array) -> jax.Array:
        """Return what `scatter` returns, up to rounding, in steps like `gather_in_steps`."""

        def reduce(x: jax.Array) -> jax.Array:
            for dim, axes in self._dims:
                for axis in axes:
                    x = _scatter_in_steps(x, axis, dim)
            return x

        return self._on_parts(reduce)(gradient).astype(jnp.float32)

    def _on_parts(self, f: ArrayFunction, leading: Sequence[str | None] = ()) -> ArrayFunction:
        """Return `f`, applied to each device's part along the partitioner's axes.

        The partitioner does not split the operand of a hand-written collective: it would gather it
        first.
        """
        automatic = automatic_axes()
        spec = only(PartitionSpec(*leading, *self.spec), automatic)
        if not self._dims or not any(spec):
            return f
        return jax.shard_map(
            f, in_specs=spec, out_specs=spec, axis_names=automatic, check_vma=False
        )


GatherTree: TypeAlias = "Gather | dict[str, GatherTree]"  # a tree like the parameters


def map_gathers(f: Callable[..., jax.Array], gathers: GatherTree, *trees: Params) -> Params:
    """Apply `f(gather, *leaves)` to every parameter, as `jax.tree.map` does; None stays None."""

    def apply(gather: Gather, *leaves: jax.Array | None) -> jax.Array | None:
        return None if leaves[0] is None else f(gather, *leaves)

    return jax.tree.map(apply, gathers, *trees, is_leaf=lambda x: isinstance(x, Gather))


def gather_tree(gathers: GatherTree, params: Params) -> Params:
    return map_gathers(lambda gather, shard: gather(shard), gathers, params)


def sum_replicas(gathers: GatherTree, gradients: Params, axes: Sequence[str]) -> Params:
    """Sum each gradient over those `axes` that do not split its parameter; see `Gather.scatter`."""

    def sum_leaf(gather: Gather, gradient: jax.Array) -> jax.Array:
        return psum(gradient, [axis for axis in axes if axis not in gather.axes])

    return map_gathers(sum_leaf, gathers, gradients)


def psum(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Sum over the axes that have more than one device.

    XLA's partitioner fails on a sum over axes of size one in a program whose larger axes are all
    automatic.
    """
    several = tuple(axis for axis in axes if lax.axis_size(axis) > 1)
    return lax.psum(x, several) if several else x


def own_share(x: jax.Array) -> jax.Array:
    """Return this stage's part of an array that all S stages have: [n, ...] -> [ceil(n / S), ...].

    Parts of the last stages end in zeros where S does not divide n.
    """
    size = lax.axis_size("stage")
    parts = _padded(x, size).reshape(size, -1, *x.shape[1:])
    return parts[lax.axis_index("stage")]


def share_from(x: jax.Array, source: int) -> jax.Array:
    """Return this stage's part of stage `source`'s array, divided as `own_share` does."""
    size = lax.axis_size("stage")
    if size == 1:
        return x
    parts = _padded(x, size).reshape(size, -1, *x.shape[1:])  # [n, ...] -> [S, P, ...]
    # Entry s of the result is what stage s sent to this one, [S, P, ...].
    return lax.all_to_all(parts, "stage", split_axis=0, concat_axis=0)[source]


def joined_shares(share: jax.Array, num: int) -> jax.Array:
    """Return on every stage the array [n, ...] that the stages hold in parts."""
    return lax.all_gather(share, "stage", axis=0, tiled=True)[:num]


def _padded(x: jax.Array, size: int) -> jax.Array:
    return jnp.pad(x, [(0, -x.shape[0] % size)] + [(0, 0)] * (x.ndim - 1))


def _gather_in_steps(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Return [..., n * devices, ...] of [..., n, ...]; shards go around in both directions."""
    devices, n, index = lax.axis_size(axis), x.shape[dim], lax.axis_index(axis)
    # Every element is written below.
    full = lax.empty((*x.shape[:dim], n * devices, *x.shape[dim + 1 :]), x.dtype)
    full = lax.dynamic_update_slice_in_dim(full, x, index * n, dim)
    ahead = back = x
    for step in range(1, devices // 2 + 1):
        # After k steps a device has the shards of the k-th devices before and after it.
        ahead = ring(ahead, devices, +1, axis)
        full = lax.dynamic_update_slice_in_dim(full, ahead, (index - step) % devices * n, dim)
        if 2 * step < devices:
            back = ring(back, devices, -1, axis)
            full = lax.dynamic_update_slice_in_dim(full, back, (index + step) % devices * n, dim)
    return full


def _scatter_in_steps(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Return this device's [..., n, ...] of the sum of all devices' [..., n * devices, ...].

    With several devices it is float32, whatever the dtype of `x`.
    """
    devices, index = lax.axis_size(axis), lax.axis_index(axis)
    n = x.shape[dim] // devices

    def summed(start: int, size: int, shift: int) -> jax.Array:
        def part(number: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, number % devices * n + start, size, dim)

        # The sum of part p starts on the device after p, counted along `shift`, goes around the
        # ring, and ends on p. The first transfer is no sum yet, so `x.dtype` loses nothing.
        total = part(index - shift)
        for step in range(2, devices + 1):
            total = ring(total, devices, shift, axis).astype(jnp.float32) + part(
                index - step * shift
            )
        return total

    if devices <= 2 or n == 1:
        return summed(0, n, +1)
    # Half of each part goes around in one direction and half in the other, over other links.
    half = n // 2
    return jnp.concatenate([summed(0, half, +1), summed(half, n - half, -1)], dim)


def ring(x: Tree, size: int, shift: int, axis: str = "stage") -> Tree:
    """Send every stage's arrays to the stage `shift` places further on, in a ring of `size` stages.

    Along another mesh axis its devices take the place of the stages.
    """
    if size == 1:
        return x
    pairs = [(stage, (stage + shift) % size) for stage in range(size)]
    return jax.tree.map(partial(lax.ppermute, axis_name=axis, perm=pairs), x)


def needs_order(mesh: Mesh) -> bool:
    return mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def after(values: Tree, *earlier: object) -> Tree:
    """Return `values` unchanged, to be computed once `earlier` has been.

    XLA's CPU runtime starts a collective as soon as its operands are ready, even while a loop or a
    conditional that comes before it still runs. A manual program's collectives all have the same
    channel, by which the devices of a process find each other: two that run at once on the same
    devices exchange each other's values, or wait forever. TPUs and GPUs keep the program's order.

    An optimization barrier does not help, since XLA removes it before it schedules. What works is a
    data dependency, through a condition that is never true, which XLA does not notice.

    The earlier values are pytrees of arrays; None is ignored.
    """
    leaves = [leaf for leaf in jax.tree.leaves(earlier) if leaf.size]
    if not leaves:
        return values
    sample = sum(leaf[(0,) * leaf.ndim].astype(jnp.float32) for leaf in leaves)
    never = (sample < 0) & (sample > 0)
    return jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), values)
