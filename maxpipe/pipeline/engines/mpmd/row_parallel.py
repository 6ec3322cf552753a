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
from typing import NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import AbstractMesh, PartitionSpec
from jax.tree_util import KeyPath

from maxpipe.config import ConfigError, Problem
from maxpipe.pipeline.manual import BATCH_AXES, Gather, psum
from maxpipe.sharding.collectives import CONTEXT_AXIS
from maxpipe.sharding.rules import AxisRules, axes_of, only, without


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
        """Return one device's part of an input as units take it.

        Args:
          mesh: the abstract mesh of a stage.
          specs: layouts in which units take inputs; inputs without one are whole on each device.
          path: the path of the input.
          x: the array at rest.
        """
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

    Args:
      rules: logical axis rules of a stage.
      once: whether parameters are prepared once a step; units are then manual even if each of
        these axes has one device.
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
    """Return a counterpart of `jax.make_jaxpr` for functions of one device's parts.

    Args:
      mesh: the abstract mesh of a stage.
      axes: mesh axes over which the functions are manual.
    """

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
    """Check that units are manual over the axis that splits weights, if one gather is to serve all.

    Args:
      gather: `pipeline.fsdp_gather`.
      axes: the result of `manual_axes`.
      rules: logical axis rules of a stage.

    Raises:
      ConfigError: fsdp is left to the partitioner, which gathers in every unit.
    """
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
    """Return how the sum of one output is kept.

    Args:
      spec: layout of the reduced sum.
      gather: the `Gather` of the parameter whose gradient it is; None for a loss.
      rows: how devices share rows.
      mesh: the abstract mesh of a stage.
    """
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


def split_counts(spec: PartitionSpec, mesh: AbstractMesh, ndim: int) -> list[int]:
    # A spec may be shorter than the array: further dimensions are not split.
    entries = [*spec, *[None] * (ndim - len(spec))]
    names = [e if isinstance(e, tuple) else (e,) if e else () for e in entries]
    return [math.prod(mesh.shape[axis] for axis in axes) for axes in names]
