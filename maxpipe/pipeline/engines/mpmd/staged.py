"""A marked function of parameters and a microbatch, run over all microbatches of a batch on all stages.

Arguments of the function are known by their paths in {"params", "micro", "scales", "key"}, such as
"['params']['head']['kernel']". Letters: M microbatches, B sequences, T sequence.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.pipeline import microbatches
from maxpipe.pipeline.engines.base import Batch
from maxpipe.pipeline.engines.mpmd.program import UnitName
from maxpipe.pipeline.engines.mpmd.runner import Observer, Runner, Sums
from maxpipe.pipeline.engines.mpmd.slicing import slice_program
from maxpipe.pipeline.engines.mpmd.stages import local_view, named, paths
from maxpipe.pipeline.schedules.table import Table
from maxpipe.sharding.context_parallel import AXIS

ArraysByPath = Mapping[str, jax.Array]


class StagedProgram:
    """Traced and sliced when it is made, compiled at its first run.

    Args:
      f: of {"params", "micro", "scales", "key"} to outputs that are summed over microbatches.
      params: shapes of all parameters.
      batch: shapes of a batch, [B, T] each; M and the shards of `batch_spec` divide B.
      table: the schedule.
      meshes: sub-mesh of each stage.
      batch_spec: layout of batches.
      output_specs: layouts of the outputs' sums.
      needs_key: whether "key" is a PRNG key, or None.

    Attributes:
      program, runner: for those who look inside.
      input_names: names of the program's inputs.
      needs: for each stage, the arguments that it reads.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        params: Any,
        batch: Any,
        table: Table,
        meshes: Sequence[Mesh],
        batch_spec: PartitionSpec,
        output_specs: Sequence[PartitionSpec],
        needs_key: bool,
    ):
        self._num_microbatches = table.num_microbatches
        self._stage_of = table.stage_of_chunk.tolist()
        self._context = meshes[0].shape[AXIS]
        self._meshes = meshes
        self._batch_spec = batch_spec
        scales = (jax.ShapeDtypeStruct((), jnp.float32),) * 2
        key = jax.eval_shape(lambda: jax.random.key(0)) if needs_key else None
        micro = jax.eval_shape(self._microbatches, batch)[0]
        traced, shapes = jax.make_jaxpr(f, return_shape=True)(
            {"params": params, "micro": micro, "scales": scales, "key": key}
        )
        self.program = slice_program(traced, split_backward="W" in table.kinds)
        arguments = paths({"params": params, "micro": micro, "scales": scales, "key": key})
        self.input_names = arguments
        self._names = dict(zip(self.program.inputs, arguments, strict=True))
        self._micro = named({"micro": micro})
        self._sums = [x.shape for x in jax.tree.leaves(shapes)]
        sum_shardings = [
            {i: NamedSharding(mesh, s) for i, s in enumerate(output_specs)} for mesh in meshes
        ]
        self._sum_shardings = sum_shardings
        varying = [v for v, name in self._names.items() if name in self._micro]
        self.runner = Runner(self.program, table, meshes, varying, sum_shardings)
        self.needs = [{self._names[v] for v in needed} for needed in self.runner.needs]
        self._prepare = [
            self._prepare_stage(s, shardings) for s, shardings in enumerate(sum_shardings)
        ]

    def run(
        self,
        params: Sequence[ArraysByPath],
        batch: Batch,
        keys: Sequence[jax.Array | None],
        observe: Observer | None = None,
    ) -> Sums:
        """Sums of the outputs over all microbatches, by stage and output.

        Args:
          params: for each stage, the parameters that it needs.
          batch: laid out over the mesh of all stages; M and the shards divide its rows.
          keys: "key" on every stage.
          observe: told of every unit.
        """
        fixed, varying, sums = [], [], []
        for stage, mesh in enumerate(self._meshes):
            local = {name: local_view(x, mesh) for name, x in batch.items()}
            scalars, micro, zeros = self._prepare[stage](local, keys[stage])
            mine = params[stage] | scalars
            fixed.append({v: mine[name] for v, name in self._names.items() if name in mine})
            varying.append(
                [{v: m[name] for v, name in self._names.items() if name in m} for m in micro]
            )
            sums.append(zeros)
        return self.runner.run(fixed, varying, sums, observe)

    def compile(
        self, layouts: Mapping[str, PartitionSpec]
    ) -> Iterator[tuple[int, UnitName, jax.stages.Compiled]]:
        """Compiles the computations one by one without running any.

        Args:
          layouts: of the parameters, by name.

        Yields:
          (stage, computation, executable), in an order that respects dependencies.
        """
        known = {
            name: PartitionSpec(*self._batch_spec[: x.ndim]) for name, x in self._micro.items()
        } | dict(layouts)
        specs = {v: known.get(name, PartitionSpec()) for v, name in self._names.items()}
        for name in self.program.computations:
            stage, executable = self._stage_of[name.chunk], self.runner.executables[name]
            mesh = self._meshes[stage]

            def abstract(v: Any, mesh: Mesh = mesh) -> jax.ShapeDtypeStruct:
                return jax.ShapeDtypeStruct(
                    v.aval.shape, v.aval.dtype, sharding=NamedSharding(mesh, specs[v])
                )

            sums = [
                jax.ShapeDtypeStruct(
                    self._sums[i], jnp.float32, sharding=self._sum_shardings[stage][i]
                )
                for i in executable.outputs
            ]
            lists = executable.donated, executable.kept, executable.fixed, executable.varying
            compiled = executable.run.lower(
                sums, *([abstract(v) for v in vs] for vs in lists)
            ).compile()
            for v, sharding in zip(executable.writes, compiled.output_shardings[1], strict=True):
                specs[v] = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
            yield stage, name, compiled

    def _microbatches(self, batch: Batch) -> list[Batch]:
        split = microbatches.split(
            microbatches.prepared(batch, self._context), self._num_microbatches
        )
        return [{name: x[m] for name, x in split.items()} for m in range(self._num_microbatches)]

    def _prepare_stage(
        self, stage: int, sum_shardings: Mapping[int, NamedSharding]
    ) -> Callable[..., Any]:
        """One program for all that a stage needs before its first unit."""
        mesh, needs, outputs = (
            self._meshes[stage],
            self.needs[stage],
            sorted(self.runner.outputs[stage]),
        )

        def prepare(batch: Batch, key: jax.Array | None) -> Any:
            scales = 1 / microbatches.weight_sum(batch), jnp.float32(1 / batch["tokens"].shape[0])
            scalars = named({"scales": scales, "key": key})
            micro = [named({"micro": m}) for m in self._microbatches(batch)]
            zeros = {i: jnp.zeros(self._sums[i], jnp.float32) for i in outputs}
            return _only(scalars, needs), [_only(m, needs) for m in micro], zeros

        rows = {
            n: NamedSharding(mesh, PartitionSpec(*self._batch_spec[: x.ndim]))
            for n, x in self._micro.items()
        }
        shardings = (
            None,
            [_only(rows, needs)] * self._num_microbatches,
            {i: sum_shardings[i] for i in outputs},
        )
        return jax.jit(prepare, out_shardings=shardings)


def _only(named: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: x for name, x in named.items() if name in names}
