"""Let each device of a stage compute on its own rows, and sum over devices once a step.

XLA's partitioner would sum the weight gradients of every unit over the devices, since each unit is
a program whose results have to be whole. Here the units are manual over the mesh axes along which
devices have rows or tokens of their own (data, fsdp, expert, context); the partitioner handles the
other axes. Each device adds its own gradients up over all microbatches, and one program for each
chunk sums them over the devices at the end.

An array that differs between devices has a leading dimension for them: a residual [4, 8] of a
device is part of an array [n, 4, 8] on a stage of n devices, and so is a sum of gradients.

Parameters that lie over fsdp are gathered in each unit, where they are used (`Gather.__call__`),
and their gradients are scattered there, so that no device ever holds a whole chunk of either. With
`once` they are cast and gathered before the first unit of their chunk, and the sums of their
gradients, which are whole until then, are scattered after its last. That pays even without fsdp: on
TPUs a product that casts its weights is slower than one of weights that are cast already.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, Var
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from maxpipe.config import ConfigError, Problem
from maxpipe.pipeline.manual import BATCH_AXES, Gather, psum
from maxpipe.sharding.collectives import CONTEXT_AXIS
from maxpipe.sharding.rules import AxisRules, axes_of, only, split_counts, without


@dataclass(frozen=True)
class RowParallel:
    """How the devices of a stage share rows and parameters.

    Attributes:
      axes: the manual mesh axes.
      gathers: the `Gather` of each parameter, by path.
      once: whether parameters are cast and gathered once a step, not in each unit.
    """

    axes: tuple[str, ...]
    gathers: Mapping[KeyPath, Gather]
    once: bool

    def unit_spec(self, path: KeyPath, spec: PartitionSpec) -> PartitionSpec:
        """Return the layout in which units take an input that lies in `spec` at rest."""
        # Without `once` units take shards, and gather them where they use them.
        gathers = self.once and path in self.gathers
        return without(spec, self.gathers[path].gathered_axes) if gathers else spec

    def unit_part(
        self,
        mesh: AbstractMesh,
        specs: Mapping[KeyPath, PartitionSpec],
        path: KeyPath,
        x: jax.ShapeDtypeStruct,
    ) -> jax.ShapeDtypeStruct:
        """Return one device's part of an input as units take it, given the array at rest."""
        if self.once and path in self.gathers:
            x = jax.ShapeDtypeStruct(x.shape, self.gathers[path].dtype_of(x))
        # What `specs` does not name, such as scales and the key, is whole on each device.
        counts = split_counts(only(specs.get(path, PartitionSpec()), self.axes), mesh, len(x.shape))
        shape = tuple(n // count for n, count in zip(x.shape, counts, strict=True))
        return jax.ShapeDtypeStruct(shape, x.dtype)


def manual_axes(rules: AxisRules, *, once: bool) -> tuple[str, ...]:
    """Return the mesh axes over which units are manual.

    There are none if nothing splits a stage's rows, unless its weights are prepared once. An axis
    stays with the partitioner if the rules lay anything over it but rows, dimensions of a parameter
    and, for `context`, tokens.

    With `once`, parameters prepared once a step, units are manual even if each of these axes has
    one device.
    """
    laid = axes_of(rules.spec(("activation_batch",)))
    # Attention across the parts of a sequence is written for one axis; elsewhere XLA divides it.
    laid |= axes_of(rules.spec(("activation_length",))) & {CONTEXT_AXIS}
    layers = axes_of(rules.spec(("layers_per_stage",)))
    several = {axis for axis in BATCH_AXES if axis in laid and axis not in layers}
    is_single = all(rules.mesh.shape[axis] == 1 for axis in BATCH_AXES)
    if not several and not (once and is_single):
        return ()
    return tuple(axis for axis in BATCH_AXES if axis in several or rules.mesh.shape[axis] == 1)


def tracer(mesh: AbstractMesh, axes: Sequence[str]) -> Callable[..., Callable[..., ClosedJaxpr]]:
    """Return a counterpart of `jax.make_jaxpr` for functions of parts, manual over `axes`."""

    def make_jaxpr(f: Callable[..., object]) -> Callable[..., ClosedJaxpr]:
        # The specs do not matter: only the body is taken, in which arrays are a device's parts.
        manual = jax.shard_map(
            f,
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names=set(axes),
            check_vma=False,
        )

        def trace(*args: object) -> ClosedJaxpr:
            outer = jax.make_jaxpr(manual)(*args)
            (call,) = outer.jaxpr.eqns
            body = call.params["jaxpr"]
            # The first operands of the call are the constants that the body captures.
            count = len(body.invars) - len(jax.tree.leaves(args))
            values = dict(zip(outer.jaxpr.constvars, outer.consts, strict=True))
            constants = [
                v.val if isinstance(v, Literal) else values[v] for v in call.invars[:count]
            ]
            jaxpr = body.replace(
                constvars=body.invars[:count],
                invars=body.invars[count:],
                debug_info=body.debug_info.with_unknown_names(),
            )
            return ClosedJaxpr(jaxpr, constants)

        return trace

    return make_jaxpr


def check_gather(gather: str, axes: Sequence[str], rules: AxisRules) -> None:
    """Raise ConfigError if one gather is to serve all units, but the partitioner gathers."""
    if gather == "once" and rules.mesh.shape["fsdp"] > 1 and "fsdp" not in axes:
        message = (
            "once needs rules that lay rows over mesh axis fsdp, and not the layers of a stage; "
            "use per_iteration, or give [activation_batch, [data, fsdp, expert]] and "
            "[layers_per_stage, []]"
        )
        raise ConfigError(Problem("pipeline.fsdp_gather", message))


class Total(NamedTuple):
    """How the sum of an output over microbatches lies over the devices until it is reduced.

    Attributes:
      axes: mesh axes over which it is still to be summed; each device has a sum of its own.
      running: layout of the dimensions until then.
      spec: layout of the dimensions afterwards.
      gather: the `Gather` of its parameter, if the running sum is whole and has to be scattered.
    """

    axes: tuple[str, ...]
    running: PartitionSpec
    spec: PartitionSpec
    gather: Gather | None

    @property
    def stacked(self) -> PartitionSpec:
        return PartitionSpec(self.axes, *self.running) if self.axes else self.running

    def reduce(self, x: jax.Array) -> jax.Array:
        """Return the sum over devices of one device's sum, scattered into `spec`."""
        if not self.axes:
            return x
        # A scatter sums over the axes that it scatters over; psum does the rest.
        scattered = self.gather.gathered_axes if self.gather else ()
        x = self.gather.scatter(x[0]) if self.gather else x[0]
        return psum(x, [axis for axis in self.axes if axis not in scattered])


def total_of(
    spec: PartitionSpec, gather: Gather | None, rows: RowParallel, mesh: AbstractMesh
) -> Total:
    """Return how the sum of a gradient, or without a `gather` of a loss, is kept; see `Total`."""
    several = tuple(axis for axis in rows.axes if mesh.shape[axis] > 1)
    if gather is None:
        return Total(several, without(spec, rows.axes), spec, None)
    if rows.once:
        # Over axes that split the parameter in use each device has the sum of its own part.
        in_use = gather.axes - gather.gathered_axes
        axes = tuple(axis for axis in several if axis not in in_use)
        return Total(axes, without(spec, gather.gathered_axes), spec, gather)
    # Each unit has scattered it over the axes that split the parameter.
    return Total(tuple(axis for axis in several if axis not in gather.axes), spec, spec, None)


Results = TypeVar("Results")
Arrays = list[jax.Array]
UnitFunction = Callable[[Arrays, Arrays, Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]


class DeviceParts:
    """The arrays of a sliced program whose units are manual, and the programs at a chunk's ends.

    Args:
      inputs: layouts in which units take the inputs of the program.

    Attributes:
      gathers: the `Gather` of each input that is cast and gathered once a step.
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
