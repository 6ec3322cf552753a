"""Run the units of a sliced program on each device's parts of its arrays; see `row_parallel`."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from maxpipe.pipeline.engines.mpmd.row_parallel import RowParallel, Total, split_counts
from maxpipe.sharding.rules import only

Results = TypeVar("Results")
Arrays = list[jax.Array]
UnitFunction = Callable[[Arrays, Arrays, Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]


class DeviceParts:
    """The arrays of a sliced program whose units are manual, and the programs at a chunk's ends.

    Args:
      rows: how devices share rows.
      mesh: the abstract mesh of a stage.
      inputs: layouts in which units take the inputs of the program.
      paths: the path of each input in the tree of arguments.
      totals: how each output of the program is summed.

    Attributes:
      gathers: the `Gather` of each input that is cast and gathered once a step.
      totals: how each output is summed, as given.
    """

    def __init__(
        self,
        rows: RowParallel,
        mesh: AbstractMesh,
        inputs: Mapping[Var, PartitionSpec],
        paths: Mapping[Var, KeyPath],
        totals: Sequence[Total],
    ):
        self._axes = rows.axes
        self._mesh = mesh
        self._inputs = inputs
        self.totals = totals
        # Empty where each unit gathers its own weights.
        self.gathers = {
            v: rows.gathers[path] for v, path in paths.items() if rows.once and path in rows.gathers
        }

    def unit(
        self,
        run: UnitFunction,
        mesh: Mesh,
        outputs: Sequence[int],
        values: tuple[Sequence[Var], Sequence[Var], Sequence[Var]],
        arguments: tuple[Sequence[Var], Sequence[Var]],
    ) -> UnitFunction:
        """Return a unit as a function of whole arrays, given as a function of a device's parts.

        Args:
          run: the unit on a device's parts; it takes the arguments of `Executable.run`.
          mesh: the mesh of the stage.
          outputs: indices of the program's outputs to which the unit adds.
          values: the values that it takes as donated and as retained, and those that it writes.
          arguments: the program's inputs that it takes as fixed and as varying.
        """
        # Specs name the manual axes alone: the partitioner lays out the others as it sees fit.
        totals = [self.totals[output] for output in outputs]
        sums = [only(total.stacked, self._axes) for total in totals]
        # Values that units hand on have one dimension more, for the devices: [n, ...].
        donated, retained, writes = ([PartitionSpec(self._axes)] * len(part) for part in values)
        fixed, varying = ([only(self._inputs[v], self._axes) for v in part] for part in arguments)

        def per_device(
            sums: Arrays, donated: Arrays, retained: Arrays, fixed: Arrays, varying: Arrays
        ) -> tuple[Arrays, Arrays]:
            # A device has length 1 of that dimension: [1, ...] -> [...].
            own = [x[0] if t.axes else x for x, t in zip(sums, totals, strict=True)]
            parts = [x[0] for x in donated], [x[0] for x in retained]
            results, written = run(own, *parts, fixed, varying)
            # [...] -> [1, ...], which the manual program joins to [n, ...].
            stacked = [x[None] if t.axes else x for x, t in zip(results, totals, strict=True)]
            return stacked, [jnp.asarray(x)[None] for x in written]

        specs = sums, donated, retained, fixed, varying
        return self._manual(per_device, mesh, specs, (sums, writes))

    def gather(self, mesh: Mesh, inputs: Sequence[Var], name: str) -> jax.stages.Wrapped:
        """Return a program that gathers inputs on a stage: list of shards to list of arrays."""
        gathers = [self.gathers[v] for v in inputs]

        def gather(shards: Arrays) -> Arrays:
            return [g.gather(x) for g, x in zip(gathers, shards, strict=True)]

        # From the shards at rest to what units take.
        whole = [only(self._inputs[v], self._axes) for v in inputs]
        # An executable has the name of its function, in reports and profiles.
        run = self._manual(gather, mesh, ([only(g.spec, self._axes) for g in gathers],), whole)
        run.__name__ = name
        return jax.jit(run, out_shardings=[NamedSharding(mesh, self._inputs[v]) for v in inputs])

    def reduction(self, mesh: Mesh, outputs: Sequence[int], name: str) -> jax.stages.Wrapped:
        """Return a program that sums the running sums of outputs over the devices of a stage."""
        totals = [self.totals[output] for output in outputs]

        def reduce(sums: Arrays) -> Arrays:
            return [total.reduce(x) for total, x in zip(totals, sums, strict=True)]

        # From a sum for each device to the part of the total that each has to keep.
        before = [only(total.stacked, self._axes) for total in totals]
        after = [only(total.spec, self._axes) for total in totals]
        run = self._manual(reduce, mesh, (before,), after)
        run.__name__ = name
        return jax.jit(run, out_shardings=[NamedSharding(mesh, total.spec) for total in totals])

    def stacked(self, part: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return the array that holds all devices' values, given one device's."""
        count = math.prod(self._mesh.shape[axis] for axis in self._axes)
        return jax.ShapeDtypeStruct((count, *part.shape), part.dtype)

    def stacked_spec(self, spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(self._axes, *spec)

    def whole(self, part: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        counts = split_counts(only(spec, self._axes), self._mesh, len(part.shape))
        shape = tuple(n * count for n, count in zip(part.shape, counts, strict=True))
        return jax.ShapeDtypeStruct(shape, part.dtype)

    def running_sum(self, output: int, part: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return the running sum of an output, given one device's term of it."""
        total = self.totals[output]
        shape = self.reduced_sum(output, part).shape
        # Each device along `total.axes` has a sum of its own until the step is over.
        if total.axes:
            shape = (math.prod(self._mesh.shape[axis] for axis in total.axes), *shape)
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def reduced_sum(self, output: int, part: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return the sum of an output over devices and microbatches, given one device's term."""
        shape = self.whole(part, self.totals[output].running).shape
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def _manual(
        self, f: Callable[..., Results], mesh: Mesh, in_specs: object, out_specs: object
    ) -> Callable[..., Results]:
        # As in the trace of the units, see `tracer`: nothing tracks what varies over the axes.
        return jax.shard_map(
            f,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self._axes),
            check_vma=False,
        )
