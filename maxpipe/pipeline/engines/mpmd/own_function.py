"""Run a user's function over all microbatches on all stages, for `maxpipe.pipeline.mpmd`.

Letters: M microbatches, B rows of a batch.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import NamedSharding, PartitionSpec

from maxpipe.pipeline.engines.mpmd.fitting import (
    check_layouts,
    check_program,
    fitted,
    layout,
)
from maxpipe.pipeline.engines.mpmd.own_inputs import (
    Arguments,
    Settings,
    check_results,
    first_gradient,
    inputs,
)
from maxpipe.pipeline.engines.mpmd.program import SlicedProgram
from maxpipe.pipeline.engines.mpmd.runner import ArraysByVar, Runner, Sums
from maxpipe.pipeline.engines.mpmd.slicing import slice_program

ResultT = TypeVar("ResultT")


class PipelinedProgram(Generic[ResultT]):
    """A function that is traced for given shapes, cut, and ready to run.

    Args:
      function: the user's function of (params, microbatch, *shared).
      shapes: shapes of the arguments of a call, with the whole batch.
      settings: what `pipelined` was given.

    Attributes:
      sliced: the program; its inputs are the leaves of the arguments.
      param_shardings: the sharding of each leaf of the parameters, on the stage where it belongs.

    Raises:
      ValueError: function, table, meshes and layouts do not fit together.
    """

    def __init__(self, function: Callable[..., ResultT], shapes: Arguments, settings: Settings):
        self._num_microbatches = settings.table.num_microbatches
        self._is_mean = settings.is_mean
        # 1. Trace with one microbatch, and slice.
        micro = shapes.microbatch(self._num_microbatches)
        traced, results = jax.make_jaxpr(function, return_shape=True)(
            micro.params, micro.batch, *micro.shared
        )
        check_results(results)
        check_layouts(traced, settings.meshes)
        has_gradients = settings.table.kinds != ("F",)
        self.sliced = slice_program(traced, split_backwards="W" in settings.table.kinds)
        check_program(self.sliced, settings.table)
        self._result_shapes, self._result_tree = jax.tree.flatten(results)
        # 2. Choose where parameters and their gradients lie.
        self._inputs = dict(zip(self.sliced.inputs, inputs(micro, settings), strict=True))
        stage_of_chunk = settings.table.stage_of_chunk.tolist()
        owner = {
            v: _first_reader(self.sliced, v, stage_of_chunk)
            for v, entry in self._inputs.items()
            if entry.kind == "param"
        }
        self.param_shardings = [self._layout(v, owner[v], settings) for v in owner]
        specs = [PartitionSpec() for _ in self._result_shapes]
        self._stage_of_result: dict[int, int] = {}
        if has_gradients:
            # Gradients have the order of the parameters.
            for i, v in enumerate(owner, first_gradient(results, shapes.params)):
                specs[i], self._stage_of_result[i] = self._inputs[v].spec, owner[v]
        self._sum_shardings = [
            {
                i: NamedSharding(mesh, fitted(spec, self._result_shapes[i].shape, mesh))
                for i, spec in enumerate(specs)
            }
            for mesh in settings.meshes
        ]
        # 3. Prepare the stages.
        varying = [v for v, entry in self._inputs.items() if entry.varies]
        self._runner = Runner(
            self.sliced, settings.table, settings.meshes, varying, self._sum_shardings
        )
        for stage, outputs in enumerate(self._runner.outputs):
            for output in sorted(outputs):
                # Gradients belong to their parameter's stage, others to one that adds to them.
                self._stage_of_result.setdefault(output, stage)
        self._layouts = [
            {
                v: self._layout(v, stage, settings)
                for v in self._inputs
                if v in self._runner.needs[stage]
            }
            for stage in range(len(settings.meshes))
        ]
        self._prepare = [self._prepare_stage(stage) for stage in range(len(settings.meshes))]
        self._finish = [self._finish_stage(stage) for stage in range(len(settings.meshes))]
        self._add = jax.jit(jnp.add, donate_argnums=0)

    def _layout(self, v: Var, stage: int, settings: Settings) -> NamedSharding:
        entry = self._inputs[v]
        return layout(settings.meshes[stage], entry.spec, entry.shape, entry.name, stage)

    def run(self, arguments: Arguments) -> ResultT:
        leaves = dict(zip(self.sliced.inputs, jax.tree.leaves(arguments), strict=True))
        fixed: list[ArraysByVar] = []
        varying: list[list[ArraysByVar]] = []
        sums: Sums = []
        for stage, layouts in enumerate(self._layouts):
            # A stage gets what its own units read, no more.
            arrays = {v: jax.device_put(leaves[v], layouts[v]) for v in layouts}
            fixed.append({v: x for v, x in arrays.items() if not self._inputs[v].varies})
            names = self._varying(stage)
            micro, zeros = self._prepare[stage]([arrays[v] for v in names])
            varying.append([dict(zip(names, values, strict=True)) for values in micro])
            sums.append(zeros)
        return self._reduced(self._runner.run(fixed, varying, sums))

    def _varying(self, stage: int) -> list[Var]:
        """Return the inputs on a stage that differ between microbatches, in order."""
        return [v for v in self._layouts[stage] if self._inputs[v].varies]

    def _prepare_stage(self, stage: int) -> jax.stages.Wrapped:
        """Return a program: `_varying` arrays -> (list of them by microbatch, zeros by output)."""
        varying = self._varying(stage)
        outputs = sorted(self._runner.outputs[stage])
        sum_dtypes = {
            i: _sum_dtype(self._result_shapes[i].dtype, is_mean=self._is_mean) for i in outputs
        }

        def prepare(arrays: list[jax.Array]) -> tuple[list[list[jax.Array]], dict[int, jax.Array]]:
            by_microbatch = [
                [self._part(v, x, m) for v, x in zip(varying, arrays, strict=True)]
                for m in range(self._num_microbatches)
            ]
            shapes = self._result_shapes
            return by_microbatch, {i: jnp.zeros(shapes[i].shape, sum_dtypes[i]) for i in outputs}

        micro = [[self._layouts[stage][v] for v in varying]] * self._num_microbatches
        zeros = {i: self._sum_shardings[stage][i] for i in outputs}
        return jax.jit(prepare, out_shardings=(micro, zeros))

    def _part(self, v: Var, x: jax.Array, microbatch: int) -> jax.Array:
        if self._inputs[v].kind == "batch":
            # [B, ...] -> [B / M, ...]: neighbouring rows, as a caller would cut them.
            rows = x.shape[0] // self._num_microbatches
            return x[microbatch * rows : (microbatch + 1) * rows]
        # Microbatches must not draw the same random numbers.
        keys = jax.vmap(lambda key: jax.random.fold_in(key, microbatch))(x.ravel())
        return keys.reshape(x.shape)

    def _reduced(self, sums: Sums) -> ResultT:
        # 1. Bring what several stages add to one result, such as the gradient of a weight that
        # they share, to the stage where it belongs.
        totals: list[dict[int, jax.Array]] = [{} for _ in sums]
        for stage, stage_sums in enumerate(sums):
            for output, total in stage_sums.items():
                target = self._stage_of_result[output]
                if target != stage:
                    total = jax.device_put(total, self._sum_shardings[target][output])
                if output in totals[target]:
                    total = self._add(total, totals[target][output])
                totals[target][output] = total
        # 2. Divide and cast.
        results: dict[int, jax.Array] = {}
        for finish, stage_totals in zip(self._finish, totals, strict=True):
            results |= finish(stage_totals)
        leaves = [results[i] for i in range(len(results))]
        tree: ResultT = jax.tree.unflatten(self._result_tree, leaves)
        return tree

    def _finish_stage(self, stage: int) -> jax.stages.Wrapped:
        """Return a program: sums of the results that belong to a stage -> these results."""
        outputs = [i for i, target in self._stage_of_result.items() if target == stage]

        def finish(totals: dict[int, jax.Array]) -> dict[int, jax.Array]:
            return {i: self._finished(i, total) for i, total in totals.items()}

        shardings = {i: self._sum_shardings[stage][i] for i in outputs}
        return jax.jit(finish, donate_argnums=0, out_shardings=shardings)

    def _finished(self, output: int, total: jax.Array) -> jax.Array:
        if self._is_mean:
            total = total / self._num_microbatches
        # Integers have the dtype of their sum, which holds means and larger counts.
        dtype = self._result_shapes[output].dtype
        return total.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else total


def _first_reader(sliced: SlicedProgram, v: Var, stage_of_chunk: list[int]) -> int:
    """Return the first stage that reads an input; the first of all if none does."""
    readers = (name for name, c in sliced.computations.items() if v in c.arguments)
    return stage_of_chunk[next((name.chunk for name in readers), 0)]


def _sum_dtype(dtype: jnp.dtype, *, is_mean: bool) -> jnp.dtype:
    # In bfloat16 a sum soon swallows small terms.
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.promote_types(dtype, jnp.float32)
    # A mean of integers is in range where their sum may not be.
    if is_mean:
        return jnp.result_type(float)
    is_unsigned = jnp.issubdtype(dtype, jnp.unsignedinteger)
    return jnp.promote_types(dtype, jnp.uint32 if is_unsigned else jnp.int32)
