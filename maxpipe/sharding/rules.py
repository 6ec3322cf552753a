"""Logical axis rules: which dimension of which array lies on which mesh axes."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.config import ConfigError, Problem

MeshAxes = tuple[str, ...]
KEY = "sharding.logical_axis_rules"


class AxisRules:
    """Turns logical axes into shardings over one mesh.

    Args:
      rules: `sharding.logical_axis_rules`, a list of [logical axis, [mesh axes]].
      mesh: the device mesh.
      say: called once for every dimension that stays whole because a mesh axis does not divide it.
      show: called once for every constraint that is applied, while a program is traced.
    """

    def __init__(
        self,
        rules: Sequence[Any],
        mesh: Mesh,
        say: Callable[[str], None] = lambda text: None,
        show: Callable[[str], None] = lambda text: None,
    ):
        self.mesh = mesh
        self._rules: dict[str, MeshAxes] = {name: tuple(axes) for name, axes in rules}
        self._say = say
        self._said: set[str] = set()
        self._show = show

    def spec(self, axes: Sequence[str | None], shape: Sequence[int] | None = None) -> PartitionSpec:
        """PartitionSpec of an array whose dimensions have these logical axes.

        Args:
          axes: logical axis of each dimension; None is whole.
          shape: if given, a dimension that its mesh axes do not divide stays whole over the axes
            that do not fit.

        Raises:
          ConfigError: a logical axis has no rule, or two dimensions claim the same mesh axis.
        """
        return self._spec(axes, shape, ())

    def spec_here(self, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
        """`spec` over the mesh axes that are not manual where this is called; `shape` is a device's part over those."""
        return self._spec(axes, shape, jax.sharding.get_abstract_mesh().manual_axes)

    def _spec(
        self, axes: Sequence[str | None], shape: Sequence[int] | None, manual: Collection[str]
    ) -> PartitionSpec:
        taken: dict[str, str] = {}
        entries: list[Any] = []
        for i, name in enumerate(axes):
            mesh_axes = tuple(axis for axis in self._mesh_axes(name) if axis not in manual)
            if shape is not None:
                mesh_axes = self._dividing(mesh_axes, shape[i], name or "")
            for axis in mesh_axes:
                if axis in taken:
                    text = f"an array has axes {taken[axis]!r} and {name!r}, and both are laid over mesh axis {axis!r}"
                    raise ConfigError(Problem(KEY, text))
                taken[axis] = name or ""
            entries.append(
                mesh_axes if len(mesh_axes) > 1 else (mesh_axes[0] if mesh_axes else None)
            )
        return PartitionSpec(*entries)

    def sharding(
        self, axes: Sequence[str | None], shape: Sequence[int] | None = None
    ) -> NamedSharding:
        """`spec` bound to the mesh."""
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def constrain(self, x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
        """Asks the partitioner to lay `x` out by its logical axes.

        Inside a `jax.shard_map` that is manual over some mesh axes, `x` is a device's part over
        those, and the others are asked for.
        """
        return self.lay_out(x, self.spec_here(axes, x.shape), axes)

    def lay_out(self, x: jax.Array, spec: PartitionSpec, axes: Sequence[str | None]) -> jax.Array:
        """Asks the partitioner to lay `x` out by `spec`; its logical axes are for those who watch."""
        manual = jax.sharding.get_abstract_mesh().manual_axes
        dims = ", ".join(f"{name or '-'}={size}" for name, size in zip(axes, x.shape, strict=True))
        within = f", inside a program manual over {', '.join(map(str, manual))}" if manual else ""
        text = f"constraint: {x.dtype} [{dims}] over {tuple(spec)}{within}"
        if text not in self._said:
            self._said.add(text)
            self._show(text)
        return jax.lax.with_sharding_constraint(
            x, spec if manual else NamedSharding(self.mesh, spec)
        )

    def size(self, axis: str) -> int:
        """Number of shards of a dimension with this logical axis."""
        size = 1
        for mesh_axis in self._mesh_axes(axis):
            size *= self.mesh.shape[mesh_axis]
        return size

    def _mesh_axes(self, name: str | None) -> MeshAxes:
        if name is None:
            return ()
        if name not in self._rules:
            raise ConfigError(
                Problem(
                    KEY, f"no rule for logical axis {name!r}; add [{name}, []] to leave it whole"
                )
            )
        return tuple(a for a in self._rules[name] if self.mesh.shape[a] > 1)

    def _dividing(self, mesh_axes: MeshAxes, size: int, name: str) -> MeshAxes:
        kept: list[str] = []
        parts = 1
        for axis in mesh_axes:
            if size % (parts * self.mesh.shape[axis]) == 0:
                kept.append(axis)
                parts *= self.mesh.shape[axis]
            else:
                axis_size = self.mesh.shape[axis]
                text = f"axis {name!r} of size {size} stays whole over mesh axis {axis!r} of size {axis_size}"
                if text not in self._said:
                    self._said.add(text)
                    self._say(text + ", which does not divide it")
        return tuple(kept)


def without(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """`spec` with the given mesh axes removed: the layout after a gather over them."""
    return _filtered(spec, lambda axis: axis not in axes)


def only(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """`spec` reduced to the given mesh axes."""
    return _filtered(spec, lambda axis: axis in axes)


def _filtered(spec: PartitionSpec, keep: Callable[[str], bool]) -> PartitionSpec:
    entries: list[Any] = []
    for entry in spec:
        names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
        kept = tuple(n for n in names if keep(n))
        entries.append(kept if len(kept) > 1 else (kept[0] if kept else None))
    return PartitionSpec(*entries)
