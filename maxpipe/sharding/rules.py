"""Turn logical axes of arrays into shardings over the mesh."""

import math
from collections.abc import Callable, Collection, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from maxpipe.config import ConfigError, Problem
from maxpipe.config.terminal import Note, ignore_note
from maxpipe.sharding.torus import ONE_SLICE, Route

MeshAxes = tuple[str, ...]
AXIS_RULES_KEY = "sharding.logical_axis_rules"


class AxisRules:
    """Logical axis rules, bound to one mesh.

    Args:
      rules: `sharding.logical_axis_rules`, pairs of a logical axis and its mesh axes.
      mesh: the device mesh; an abstract one gives specs and constraints for any mesh like it.
      note: function that gets one line for each dimension that stays whole over a mesh axis that
        does not divide it.
      show: function that gets one line for each constraint, while a program is traced.
      route: what explicit gathers and scatters need to know about the machine.

    Attributes:
      mesh, route: the arguments.
    """

    def __init__(
        self,
        rules: Sequence[tuple[str, Sequence[str]]],
        mesh: Mesh | AbstractMesh,
        note: Note = ignore_note,
        show: Note | None = None,
        route: Route = ONE_SLICE,
    ):
        self.mesh = mesh
        self.route = route
        self._rules: dict[str, MeshAxes] = {name: tuple(axes) for name, axes in rules}
        self._note = note
        self._show = show
        self._reported: set[str] = set()

    def spec(self, axes: Sequence[str | None], shape: Sequence[int] | None = None) -> PartitionSpec:
        """Return the PartitionSpec of an array whose dimensions have these logical axes.

        Args:
          axes: logical axis of each dimension; None leaves it whole.
          shape: if given, a dimension is not split over mesh axes that do not divide it.

        Raises:
          ConfigError: a logical axis has no rule, or two dimensions claim the same mesh axis.
        """
        return self._spec(axes, shape, ())

    def automatic_spec(self, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
        """Return `spec` over the mesh axes that are not manual where this is called.

        `shape` is the shape of one device's part over the manual axes.
        """
        return self._spec(axes, shape, jax.sharding.get_abstract_mesh().manual_axes)

    def _spec(
        self, axes: Sequence[str | None], shape: Sequence[int] | None, manual: Collection[str]
    ) -> PartitionSpec:
        taken: dict[str, str] = {}
        entries: list[MeshAxes] = []
        for i, name in enumerate(axes):
            mesh_axes = tuple(axis for axis in self._mesh_axes(name) if axis not in manual)
            if shape is not None:
                mesh_axes = self._dividing(mesh_axes, shape[i], name or "")
            for axis in mesh_axes:
                if axis in taken:
                    message = (
                        f"an array has axes {taken[axis]!r} and {name!r}, and both are laid over "
                        f"mesh axis {axis!r}"
                    )
                    raise ConfigError(Problem(AXIS_RULES_KEY, message))
                taken[axis] = name or ""
            entries.append(mesh_axes)
        return _partition_spec(entries)

    def sharding(
        self, axes: Sequence[str | None], shape: Sequence[int] | None = None
    ) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def constrain(self, x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
        """Tell XLA's partitioner to lay `x` out by its logical axes.

        Inside a `jax.shard_map` that is manual over some mesh axes, `x` is a device's part over
        those, and the constraint is over the others.
        """
        return self.lay_out(x, self.automatic_spec(axes, x.shape), axes)

    def lay_out(self, x: jax.Array, spec: PartitionSpec, axes: Sequence[str | None]) -> jax.Array:
        """Tell XLA's partitioner to lay `x` out by `spec`; its logical axes are for `show`."""
        manual = jax.sharding.get_abstract_mesh().manual_axes
        if self._show is not None:
            sizes = zip(axes, x.shape, strict=True)
            dims = ", ".join(f"{name or '-'}={size}" for name, size in sizes)
            text = f"constraint: {x.dtype} [{dims}] over {tuple(spec)}"
            if manual:
                text += f", inside a program manual over {', '.join(map(str, manual))}"
            if text not in self._reported:
                self._reported.add(text)
                self._show(text)
        layout = spec if manual else NamedSharding(self.mesh, spec)
        return jax.lax.with_sharding_constraint(x, layout)

    def size(self, axis: str) -> int:
        return math.prod(self.mesh.shape[mesh_axis] for mesh_axis in self._mesh_axes(axis))

    def _mesh_axes(self, name: str | None) -> MeshAxes:
        if name is None:
            return ()
        if name not in self._rules:
            message = f"no rule for logical axis {name!r}; add [{name}, []] to leave it whole"
            raise ConfigError(Problem(AXIS_RULES_KEY, message))
        return tuple(a for a in self._rules[name] if self.mesh.shape[a] > 1)

    def _dividing(self, mesh_axes: MeshAxes, size: int, name: str) -> MeshAxes:
        """Return the mesh axes, from the first on, that split `size` evenly; report the others."""
        dividing: list[str] = []
        num_shards = 1
        for axis in mesh_axes:
            axis_size = self.mesh.shape[axis]
            if size % (num_shards * axis_size) == 0:
                dividing.append(axis)
                num_shards *= axis_size
                continue
            text = (
                f"axis {name!r} of size {size} stays whole over mesh axis {axis!r} of size "
                f"{axis_size}"
            )
            if text not in self._reported:
                self._reported.add(text)
                self._note(text + ", which does not divide it")
        return tuple(dividing)


def without(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Return `spec` without the given mesh axes: the layout after a gather over them."""
    return _filtered(spec, lambda axis: axis not in axes)


def only(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    return _filtered(spec, lambda axis: axis in axes)


def axes_of(spec: PartitionSpec) -> set[str]:
    """Return the mesh axes that `spec` lays dimensions over."""
    return {axis for axes in axes_by_dimension(spec) for axis in axes}


def axes_by_dimension(spec: PartitionSpec) -> list[MeshAxes]:
    """Return the mesh axes of each dimension: P(None, "fsdp") -> [(), ("fsdp",)]."""
    return [entry if isinstance(entry, tuple) else (entry,) if entry else () for entry in spec]


def split_counts(spec: PartitionSpec, mesh: Mesh | AbstractMesh, ndim: int) -> list[int]:
    """Return over how many devices `spec` splits each dimension of an array."""
    # A spec may be shorter than the array: further dimensions are not split.
    dimensions = axes_by_dimension(spec) + [()] * (ndim - len(spec))
    return [math.prod(mesh.shape[axis] for axis in axes) for axes in dimensions]


def _filtered(spec: PartitionSpec, keep: Callable[[str], bool]) -> PartitionSpec:
    return _partition_spec([tuple(filter(keep, axes)) for axes in axes_by_dimension(spec)])


def _partition_spec(entries: Sequence[MeshAxes]) -> PartitionSpec:
    """Return the PartitionSpec of mesh axes per dimension: None for no axis, a name for one."""
    return PartitionSpec(
        *(axes if len(axes) > 1 else (axes[0] if axes else None) for axes in entries)
    )
