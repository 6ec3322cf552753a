"""Run a marked function of parameters and a microbatch over all microbatches on all stages.

The function has one argument, {"params", "micro", "scales", "key"}. A leaf of it is identified by
its path, a tuple of typed keys such as (DictKey("params"), DictKey("head"), DictKey("kernel")).
Letters: M microbatches, B sequences of the global batch, T tokens of each.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from hashlib import sha256
from types import MappingProxyType
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, KeyPath, tree_map_with_path

from maxpipe.devices.chips import coordinates, slice_of
from maxpipe.devices.transfers import absent, is_here, processes_of
from maxpipe.model.parameters import Params
from maxpipe.pipeline import microbatches
from maxpipe.pipeline.engines.base import Batch
from maxpipe.pipeline.engines.mpmd.offloading import named_residuals
from maxpipe.pipeline.engines.mpmd.program import UnitName, shape_of
from maxpipe.pipeline.engines.mpmd.row_parallel import DeviceParts, RowParallel, total_of, tracer
from maxpipe.pipeline.engines.mpmd.runner import ArraysByVar, Observer, Runner, Sums, sent_spec
from maxpipe.pipeline.engines.mpmd.slicing import slice_program
from maxpipe.pipeline.engines.mpmd.stage_clock import StageClock
from maxpipe.pipeline.schedules.table import Table
from maxpipe.sharding.collectives import CONTEXT_AXIS

ArraysByPath = dict[KeyPath, jax.Array]
_MODULE_NAME = re.compile(r"module @\S+")  # F1 and F2 may have the same program


class Arguments(TypedDict):
    """The argument of the traced function.

    Attributes:
      scales: factors of the losses, see `MarkedModel.loss`; float32 scalars.
      key: data of the PRNG key of the step, or None.
    """

    params: Params
    micro: Batch
    scales: tuple[jax.Array, jax.Array]
    key: jax.Array | None


class CompiledUnit(NamedTuple):
    """A computation compiled for its stage.

    Attributes:
      compiled: the executable, shared by chunks whose programs differ only in their devices.
      offloaded: bytes per device that it takes from the host's memory or leaves there.
    """

    stage: int
    name: UnitName
    compiled: jax.stages.Compiled
    offloaded: int = 0


class NotCompiled(Exception):
    """The compiler rejects the program of a computation, for a reason in its own words."""

    def __init__(self, name: UnitName, reason: str):
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


class UnitCompiler:
    """Compile the programs of units, once for all that differ only in their devices."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[bytes, Sequence[tuple[int, ...]]], jax.stages.Compiled] = {}

    def compile(self, lowered: jax.stages.Lowered, mesh: Mesh) -> jax.stages.Compiled:
        """Return an executable for devices with the same relative coordinates as the mesh's."""
        # The text has shapes, shardings and donation, but not the devices.
        text = _MODULE_NAME.sub("", lowered.as_text(), count=1)
        # Links between the devices decide how XLA lowers collectives.
        first, *others = (
            (slice_of(d), getattr(d, "core_on_chip", 0), *coordinates(d)) for d in mesh.devices.flat
        )
        places = tuple(tuple(map(int.__sub__, other, first)) for other in others)
        key = sha256(text.encode()).digest(), places
        # Chunks of equally many layers, without an end of the model, have the same key.
        if key not in self._compiled:
            self._compiled[key] = lowered.compile()
        return self._compiled[key]


class StagedProgram:
    """Trace and slice a function; compile it for the stages at its first run.

    Args:
      f: function from `Arguments` to a pytree of outputs, which are summed over microbatches.
      batch: shapes of a batch, [B, T] each; M and the shards of `batch_spec` divide B.
      outputs: for each output the path of the parameter whose gradient it is and as which it lies,
        or None for a scalar.
      rows: how the devices of a stage share rows; None if they do not.
      offloaded: names of tensors that wait for their backward in the host's memory.

    Attributes:
      paths: paths of the argument's leaves, in the order of the program's inputs.
    """

    def __init__(
        self,
        f: Callable[[Arguments], object],
        params: Params,
        batch: Mapping[str, jax.ShapeDtypeStruct],
        table: Table,
        meshes: Sequence[Mesh],
        *,
        batch_spec: PartitionSpec,
        param_specs: Mapping[KeyPath, PartitionSpec],
        outputs: Sequence[KeyPath | None],
        rows: RowParallel | None,
        needs_key: bool = False,
        offloaded: Collection[str] = (),
    ):
        self._num_microbatches = table.num_microbatches
        self._stage_of_chunk = table.stage_of_chunk.tolist()
        self._context = meshes[0].shape[CONTEXT_AXIS]
        mesh = meshes[0].abstract_mesh
        # 1. Trace and slice.
        scale = jax.ShapeDtypeStruct((), jnp.float32)
        key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))) if needs_key else None
        micro = jax.eval_shape(self._microbatches, batch)[0]
        arguments = {"params": params, "micro": micro, "scales": (scale, scale), "key": key}
        # Before `rows` turns shapes into one device's: the shapes that gathers start from.
        at_rest = by_path(arguments)
        specs = dict(param_specs)
        # Microbatches lie as batches do.
        for path, x in by_path({"micro": micro}).items():
            specs[path] = PartitionSpec(*batch_spec[: x.ndim])
        self._at_rest = {path: (at_rest[path], spec) for path, spec in specs.items()}
        make_jaxpr: Callable[..., Callable[..., ClosedJaxpr]] = jax.make_jaxpr
        if rows is not None:
            specs = {path: rows.unit_spec(path, spec) for path, spec in specs.items()}
            arguments = tree_map_with_path(partial(rows.unit_part, mesh, specs), arguments)
            make_jaxpr = tracer(mesh, rows.axes)
        traced = make_jaxpr(f)(arguments)
        self.program = slice_program(
            traced, split_backwards="W" in table.kinds, make_jaxpr=make_jaxpr
        )
        # 2. Connect the inputs of the program with leaves of the argument.
        self.paths = list(by_path(arguments))
        self._path_of = dict(zip(self.program.inputs, self.paths, strict=True))
        # What has no layout, such as scales and the key, is whole on each device.
        self._specs = {v: specs.get(path, PartitionSpec()) for v, path in self._path_of.items()}
        # 3. Prepare the stages.
        self._parts: DeviceParts | None = None
        self._sum_specs = [
            PartitionSpec() if path is None else param_specs[path] for path in outputs
        ]
        if rows is not None:
            totals = [
                total_of(spec, None if path is None else rows.gathers[path], rows, mesh)
                for spec, path in zip(self._sum_specs, outputs, strict=True)
            ]
            self._parts = DeviceParts(rows, mesh, self._specs, self._path_of, totals)
            self._sum_specs = [total.stacked for total in totals]
        shapes = map(shape_of, traced.jaxpr.outvars)
        self._sum_shapes = [
            x.shape if self._parts is None else self._parts.running_sum(output, x).shape
            for output, x in enumerate(shapes)
        ]
        self._table = table
        self._offloaded = named_residuals(self.program, offloaded)
        self._place(meshes)
        needs = self.runner.needs
        self._params = [self._inputs(inputs, "params") for inputs in needs]
        self._shared = [self._inputs(inputs, "scales", "key") for inputs in needs]
        self._micro = [self._inputs(inputs, "micro") for inputs in needs]
        self._prepare = [self._prepare_stage(stage) for stage in range(len(meshes))]

    def _place(
        self, meshes: Sequence[Mesh], processes: Sequence[frozenset[int]] | None = None
    ) -> None:
        """Make the stages' executables for devices, treated as those of `processes` if given."""
        self._meshes = meshes
        self._sum_shardings = [
            {output: NamedSharding(mesh, spec) for output, spec in enumerate(self._sum_specs)}
            for mesh in meshes
        ]
        self.runner = Runner(
            self.program,
            self._table,
            meshes,
            # A unit takes these of its microbatch, all other inputs as they are.
            self._inputs(self.program.inputs, "micro"),
            self._sum_shardings,
            self._parts,
            self._offloaded,
            processes,
        )

    def placed_on(self, meshes: Sequence[Mesh]) -> "StagedProgram":
        """Return the program for other devices, to be compiled as for those of the stages.

        Args:
          meshes: for each stage a mesh of the same size. It makes no difference which processes own
            the devices.
        """
        placed = copy(self)
        placed._place(meshes, list(map(processes_of, self._meshes)))
        return placed

    def _inputs(self, inputs: Collection[Var], *names: str) -> list[Var]:
        parts = [DictKey(name) for name in names]
        return [v for v, path in self._path_of.items() if v in inputs and path[0] in parts]

    def needed_params(self, stage: int) -> list[KeyPath]:
        return [self._path_of[v] for v in self._params[stage]]

    def run(
        self,
        params: Sequence[ArraysByPath],
        batch: Batch,
        keys: Sequence[jax.Array | None],
        observe: Observer | None = None,
        clocks: Mapping[int, StageClock] = MappingProxyType({}),
    ) -> Sums:
        """Return the sums of the outputs over all microbatches, by stage and output.

        Args:
          params: for each stage, the parameters that it needs.
          batch: global batch, laid out over all stages; M and the shards divide its rows.
          keys: "key" on each stage.

        Nothing is read from stages of other processes, and their sums are absent.
        """
        fixed: list[ArraysByVar] = []
        varying: list[list[ArraysByVar]] = []
        sums: Sums = []
        for stage, mesh in enumerate(self._meshes):
            # Only the results of such a stage are read, by transfers to this process.
            if not is_here(mesh):
                fixed.append({})
                varying.append([])
                sums.append(self._absent_sums(stage))
                continue
            # Each stage cuts microbatches out of its own copy of the batch, so none is sent.
            local = {name: local_view(x, mesh) for name, x in batch.items()}
            shared, micro, zeros = self._prepare[stage](local, keys[stage])
            # Parameters go to the units as they are, without a copy.
            arrays = {v: params[stage][self._path_of[v]] for v in self._params[stage]}
            fixed.append(arrays | dict(zip(self._shared[stage], shared, strict=True)))
            varying.append([dict(zip(self._micro[stage], x, strict=True)) for x in micro])
            sums.append(zeros)
        return self.runner.run(fixed, varying, sums, observe, clocks)

    def _absent_sums(self, stage: int) -> dict[int, jax.Array]:
        sums: dict[int, jax.Array] = {}
        for output in sorted(self.runner.outputs[stage]):
            term = shape_of(self.program.flat.jaxpr.outvars[output])
            sharding = self._sum_shardings[stage][output]
            # As after the last unit, when the devices' own sums have become one.
            if self._parts is not None:
                term = self._parts.reduced_sum(output, term)
                sharding = NamedSharding(self._meshes[stage], self._parts.totals[output].spec)
            sums[output] = absent(jax.ShapeDtypeStruct(term.shape, jnp.float32, sharding=sharding))
        return sums

    def compile(self, names: Collection[UnitName] | None = None) -> Iterator[CompiledUnit]:
        """Compile the computations one by one without running any.

        Args:
          names: names of those to compile; None for all. The values that they read from others
            are laid out as for another process, see `sent_spec`.

        Yields:
          Computations in an order that respects dependencies. For chunk 1, `gather1` gathers its
          parameters before its units and `reduce1` reduces its gradients after them.
        """
        specs, compiler, runner = dict(self._specs), UnitCompiler(), self.runner

        def is_wanted(name: UnitName) -> bool:
            return names is None or name in names

        def compiled_unit(name: UnitName, lowered: jax.stages.Lowered) -> CompiledUnit:
            stage = self._stage_of_chunk[name.chunk]
            try:
                return CompiledUnit(stage, name, compiler.compile(lowered, self._meshes[stage]))
            except jax.errors.JaxRuntimeError as error:
                raise NotCompiled(name, str(error)) from None

        for name in self.program.computations:
            stage, executable = self._stage_of_chunk[name.chunk], runner.executables[name]
            mesh = self._meshes[stage]
            # The first unit of a chunk is its forward; its weights have to be there by then.
            gather = UnitName("gather", name.chunk)
            if name.kind == "F" and name.chunk in runner.gathers and is_wanted(gather):
                inputs, run = runner.gathers[name.chunk]
                yield compiled_unit(gather, run.lower([self._shard(v, mesh) for v in inputs]))
            if not is_wanted(name):
                for v in executable.writes:
                    specs[v] = sent_spec(self.program, v, self._parts)
                continue
            lowered = executable.run.lower(
                [self._sum(stage, output) for output in executable.outputs],
                [self._value(v, specs, mesh) for v in executable.donated],
                [self._value(v, specs, mesh) for v in executable.retained],
                [self._input(v, specs, mesh) for v in executable.fixed],
                [self._input(v, specs, mesh) for v in executable.varying],
            )
            unit = compiled_unit(name, lowered)
            # Later computations read these values in the layout that XLA has chosen for them.
            _, written, _ = unit.compiled.output_shardings
            for v, sharding in zip(executable.writes, written, strict=True):
                specs[v] = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
            offloaded = sum(_device_bytes(self._value(v, specs, mesh)) for v in executable.moved)
            yield unit._replace(offloaded=offloaded)
        for chunk, (outputs, run) in runner.reductions.items():
            if is_wanted(name := UnitName("reduce", chunk)):
                sums = [self._sum(self._stage_of_chunk[chunk], output) for output in outputs]
                yield compiled_unit(name, run.lower(sums))

    def _shard(self, v: Var, mesh: Mesh) -> jax.ShapeDtypeStruct:
        x, spec = self._at_rest[self._path_of[v]]
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    def _sum(self, stage: int, output: int) -> jax.ShapeDtypeStruct:
        sharding = self._sum_shardings[stage][output]
        return jax.ShapeDtypeStruct(self._sum_shapes[output], jnp.float32, sharding=sharding)

    def _value(
        self, v: Var, specs: Mapping[Var, PartitionSpec], mesh: Mesh
    ) -> jax.ShapeDtypeStruct:
        # The trace has one device's part of a value, the executable those of all, [n, ...].
        x = shape_of(v) if self._parts is None else self._parts.stacked(shape_of(v))
        return x.update(sharding=NamedSharding(mesh, specs[v]))

    def _input(
        self, v: Var, specs: Mapping[Var, PartitionSpec], mesh: Mesh
    ) -> jax.ShapeDtypeStruct:
        # An input is not stacked: its parts make up the array as it lies on the stage.
        x = shape_of(v) if self._parts is None else self._parts.whole(shape_of(v), specs[v])
        return x.update(sharding=NamedSharding(mesh, specs[v]))

    def _microbatches(self, batch: Batch) -> list[Batch]:
        prepared = microbatches.prepared(batch, self._context)
        split = microbatches.split(prepared, self._num_microbatches)  # [M, B / M, ...] each
        return [{name: x[m] for name, x in split.items()} for m in range(self._num_microbatches)]

    def _prepare_stage(self, stage: int) -> jax.stages.Wrapped:
        """Return a program (batch, key) -> what one stage needs before its first unit.

        These are what it reads of "scales" and "key", for each microbatch what it reads of "micro",
        and the start of the sum of each output to which it adds.
        """
        outputs = sorted(self.runner.outputs[stage])
        shared_paths = [self._path_of[v] for v in self._shared[stage]]
        micro_paths = [self._path_of[v] for v in self._micro[stage]]

        def prepare(batch: Batch, key: jax.Array | None) -> tuple[object, ...]:
            # The divisors are those of the global batch, which every stage has.
            scales = 1 / microbatches.weight_sum(batch), jnp.float32(1 / batch["tokens"].shape[0])
            shared = by_path({"scales": scales, "key": key})
            micro = [by_path({"micro": arrays}) for arrays in self._microbatches(batch)]
            # Lists by position, since jax.tree cannot sort paths as keys of a dictionary.
            return (
                [shared[path] for path in shared_paths],
                [[arrays[path] for path in micro_paths] for arrays in micro],
                {output: jnp.zeros(self._sum_shapes[output], jnp.float32) for output in outputs},
            )

        mesh = self._meshes[stage]
        micro = [NamedSharding(mesh, self._specs[v]) for v in self._micro[stage]]
        zeros = {output: self._sum_shardings[stage][output] for output in outputs}
        return jax.jit(prepare, out_shardings=(None, [micro] * self._num_microbatches, zeros))


def _device_bytes(x: jax.ShapeDtypeStruct) -> int:
    assert isinstance(x.sharding, NamedSharding)
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def by_path(tree: object) -> dict[KeyPath, jax.Array]:
    """Return the leaves of a tree by their paths, in the order of the tree."""
    return dict(jax.tree_util.tree_leaves_with_path(tree))


def local_view(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Return what one stage holds of a global array, as an array of the stage, without a copy."""
    assert isinstance(x.sharding, NamedSharding)
    # The array is replicated over stages, so its shards on this stage make up a whole copy.
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    sharding = NamedSharding(mesh, x.sharding.spec)
    return jax.make_array_from_single_device_arrays(
        x.shape, sharding, [shards[d] for d in mesh.devices.flat if d in shards]
    )
