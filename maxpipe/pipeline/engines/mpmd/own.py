"""Run a user's function over all microbatches on all stages, for `maxpipe.pipeline.mpmd`.

Letters: M microbatches, B rows of a batch.
"""

import warnings
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from maxpipe.pipeline.engines.mpmd.program import SlicedProgram
from maxpipe.pipeline.engines.mpmd.runner import ArraysByVar, Runner, Sums, fitted
from maxpipe.pipeline.engines.mpmd.slicing import slice_program
from maxpipe.pipeline.schedules.table import Table
from maxpipe.sharding.rules import axes_of


class Arguments(NamedTuple):
    params: object
    batch: object
    shared: tuple[object, ...]

    def shapes(self) -> "Arguments":
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(self)):
            raise ValueError(
                "a pipelined function dispatches to the devices of all stages and cannot be "
                "traced; call it outside of jax.jit, jax.grad and jax.vmap"
            )
        shapes: Arguments = jax.tree.map(_shape, self)
        return shapes

    def microbatch(self, num_microbatches: int) -> "Arguments":
        """Return the shapes with which the function is called, those of one microbatch."""
        # For each number of rows the first array that has it; -1 for a scalar.
        rows: dict[int, str] = {}
        for path, x in tree_leaves_with_path(self.batch):
            rows.setdefault([*x.shape, -1][0], f"batch{keystr(path)}")
        if len(rows) > 1 or any(count % num_microbatches or count < 0 for count in rows):
            shapes = ", ".join(f"{name} has {max(count, 0)}" for count, name in rows.items())
            raise ValueError(
                f"all arrays of the batch need the same number of rows, a multiple of the "
                f"{num_microbatches} microbatches: {shapes}; pass what is no row of the batch "
                f"after it, as an argument that all microbatches share"
            )
        # [B, ...] -> [B / M, ...]
        micro = jax.tree.map(
            lambda x: x.update(shape=(x.shape[0] // num_microbatches, *x.shape[1:])), self.batch
        )
        return self._replace(batch=micro)


def _shape(x: object) -> jax.ShapeDtypeStruct:
    """Return shape and dtype that JAX gives an argument; a traced program has no layouts yet."""
    # NumPy arrays and Python numbers get the dtype that JAX would give them; the dtype of a number
    # is weak, so that it does not change that of an array with which it is multiplied.
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


class Settings(NamedTuple):
    """What `pipelined` was given.

    Attributes:
      meshes: the meshes of the stages, with automatic axes.
      param_specs, batch_specs: layouts, as prefixes of the trees of arrays.
      is_mean: whether results are averaged over microbatches instead of added up.
    """

    table: Table
    meshes: tuple[Mesh, ...]
    param_specs: object
    batch_specs: object
    is_mean: bool


class Input(NamedTuple):
    """One input of the function, an array.

    Attributes:
      spec: layout on each stage.
      kind: "param", "batch", "key" (a PRNG key that all microbatches share) or "shared".
    """

    name: str
    shape: jax.ShapeDtypeStruct
    spec: PartitionSpec
    kind: str

    @property
    def varies(self) -> bool:
        return self.kind in ("batch", "key")


def inputs(arguments: Arguments, settings: Settings) -> list[Input]:
    """Return the inputs, in the order of the traced program."""
    entries: list[Input] = []
    for kind, name, tree, prefix in (
        ("param", "params", arguments.params, settings.param_specs),
        ("batch", "batch", arguments.batch, settings.batch_specs),
    ):
        specs = _specs(f"{kind}_specs", prefix, tree)
        for (path, x), spec in zip(tree_leaves_with_path(tree), specs, strict=True):
            entries.append(Input(f"{name}{keystr(path)}", x, spec, kind))
    # Nothing says how further arguments may be split: each device has them whole.
    for path, x in tree_leaves_with_path(arguments.shared):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        name = f"further argument {keystr(path)}"
        if x.dtype == jnp.uint32 and x.shape[-1:] == (2,):  # as of jax.random.PRNGKey
            warnings.warn(
                f"{name} looks like a key of jax.random.PRNGKey, with which all microbatches draw "
                f"the same numbers; pass jax.random.key(seed)",
                stacklevel=2,
            )
        entries.append(Input(name, x, PartitionSpec(), "key" if is_key else "shared"))
    return entries


def _specs(name: str, prefix: object, tree: object) -> list[PartitionSpec]:
    def is_spec(node: object) -> bool:
        return isinstance(node, PartitionSpec)

    try:
        # A spec stands for the subtree below it, as in the shardings that jax.jit takes.
        full = jax.tree.map(
            lambda spec, part: jax.tree.map(lambda _: spec, part), prefix, tree, is_leaf=is_spec
        )
    except ValueError as error:
        raise ValueError(f"{name} is no prefix of the tree that it describes: {error}") from None
    specs = jax.tree.leaves(full, is_leaf=is_spec)
    if not all(map(is_spec, specs)):
        raise ValueError(f"the leaves of {name} must be PartitionSpecs")
    return specs


def first_gradient(results: object, params: object) -> int:
    """Return the index among the results' leaves at which the gradients of `params` begin."""

    def is_gradient(tree: object) -> bool:
        return _shapes(tree) == _shapes(params)

    if isinstance(results, tuple) and len(results) == 2:
        # If both look like the parameters, the function is taken for value_and_grad.
        if is_gradient(results[1]):  # jax.value_and_grad
            return len(jax.tree.leaves(results[0]))
        if is_gradient(results[0]):  # jax.grad with has_aux
            return 0
    if is_gradient(results):  # jax.grad
        return 0
    raise ValueError(
        "the function must return (value, gradients) with gradients like its first argument; "
        "pass jax.value_and_grad(loss), without argnums"
    )


def _shapes(tree: object) -> tuple[object, list[tuple[int, ...]]]:
    return jax.tree.structure(tree), [x.shape for x in jax.tree.leaves(tree)]


def _check_program(program: SlicedProgram, table: Table) -> None:
    if program.num_chunks != table.num_chunks:
        raise ValueError(
            f"the function has {program.num_chunks} stage marks, but the table ({table.name}, "
            f"{table.num_stages} stages with {table.num_repeats} chunks each) needs "
            f"{table.num_chunks}; call mark_stage_boundary after each chunk, the last one "
            f"too, before the loss"
        )
    kinds = {name.kind for name in program.computations}
    # Which kinds there are follows from whether the function was differentiated, and how sliced.
    if ("B" in kinds or "I" in kinds, "W" in kinds) != (table.kinds != ("F",), "W" in table.kinds):
        raise ValueError(
            f"the program is cut into {', '.join(sorted(kinds))}, but the table has "
            f"{', '.join(table.kinds)}; pass jax.value_and_grad(loss) with trained parameters "
            f"before the first mark, or for an evaluation the loss itself and "
            f"forward_only(table); slice with split_backwards={'W' in table.kinds}"
        )


ResultT = TypeVar("ResultT")


class PipelinedProgram(Generic[ResultT]):
    """A function that is traced for given shapes, cut, and ready to run.

    Args:
      function: the user's function of (params, microbatch, *shared).
      shapes: shapes of the arguments of a call, with the whole batch.

    Attributes:
      sliced: the program; its inputs are the leaves of the arguments.
      param_shardings: the sharding of each leaf of the parameters, on the stage where it belongs.
    """

    def __init__(self, function: Callable[..., ResultT], shapes: Arguments, settings: Settings):
        self._num_microbatches = settings.table.num_microbatches
        self._is_mean = settings.is_mean
        # 1. Trace with one microbatch, and slice.
        micro = shapes.microbatch(self._num_microbatches)
        traced, results = jax.make_jaxpr(function, return_shape=True)(
            micro.params, micro.batch, *micro.shared
        )
        has_gradients = settings.table.kinds != ("F",)
        self.sliced = slice_program(traced, split_backwards="W" in settings.table.kinds)
        _check_program(self.sliced, settings.table)
        self._result_shapes, self._result_tree = jax.tree.flatten(results)
        # 2. Choose where parameters and their gradients lie.
        self._inputs = dict(zip(self.sliced.inputs, inputs(micro, settings), strict=True))
        stage_of_chunk = settings.table.stage_of_chunk.tolist()
        owner = dict.fromkeys((v for v, e in self._inputs.items() if e.kind == "param"), 0)
        # The first reader owns a parameter, the first stage one that nothing reads.
        for name, computation in reversed(list(self.sliced.computations.items())):
            for v in owner.keys() & {*computation.arguments}:
                owner[v] = stage_of_chunk[name.chunk]
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
        stages = range(len(settings.meshes))
        self._layouts = [
            {v: self._layout(v, s, settings) for v in self._inputs if v in self._runner.needs[s]}
            for s in stages
        ]
        self._prepare = list(map(self._prepare_stage, stages))
        self._finish = list(map(self._finish_stage, stages))
        self._add = jax.jit(jnp.add, donate_argnums=0)

    def _layout(self, v: Var, stage: int, settings: Settings) -> NamedSharding:
        (name, x, spec, _), mesh = self._inputs[v], settings.meshes[stage]
        where = f"{name} {list(x.shape)} with {spec} on stage {stage}"
        if not axes_of(spec).issubset(mesh.axis_names):
            raise ValueError(f"{where}: its mesh has the axes {', '.join(mesh.axis_names)}")
        # The caller has asked for these axes, so none may be left out silently.
        if fitted(spec, x.shape, mesh) != spec:
            raise ValueError(f"{where}: the mesh {dict(mesh.shape)} does not divide it")
        return NamedSharding(mesh, spec)

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
        outputs = [i for i, target in self._stage_of_result.items() if target == stage]

        def result(output: int, total: jax.Array) -> jax.Array:
            if self._is_mean:
                total = total / self._num_microbatches
            # Integers have the dtype of their sum, which holds means and larger counts.
            dtype = self._result_shapes[output].dtype
            return total.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else total

        def finish(totals: dict[int, jax.Array]) -> dict[int, jax.Array]:
            return {i: result(i, total) for i, total in totals.items()}

        shardings = {i: self._sum_shardings[stage][i] for i in outputs}
        return jax.jit(finish, donate_argnums=0, out_shardings=shardings)


def _sum_dtype(dtype: jnp.dtype, *, is_mean: bool) -> jnp.dtype:
    # In bfloat16 a sum soon swallows small terms.
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.promote_types(dtype, jnp.float32)
    # A mean of integers is in range where their sum may not be.
    if is_mean:
        return jnp.result_type(float)
    is_unsigned = jnp.issubdtype(dtype, jnp.unsignedinteger)
    return jnp.promote_types(dtype, jnp.uint32 if is_unsigned else jnp.int32)
