"""Pipeline your own model: run a marked training function stage by stage, in any schedule.

The model is any JAX function of parameters and a batch, such as `apply` of a Flax module and a
loss. `mark_stage_boundary` marks where a stage ends; `pipelined` cuts the function and its gradient
there, and runs each part on its stage's mesh of devices, in the order of a schedule's table:

    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import Mesh
    >>> from maxpipe.pipeline import mpmd
    >>> def loss(params, batch):
    ...     x = mpmd.mark_stage_boundary(jnp.tanh(batch["x"] @ params["first"]))  # ends stage 0
    ...     x = mpmd.mark_stage_boundary(x @ params["second"])  # ends stage 1
    ...     return jnp.mean((x - batch["y"]) ** 2)
    >>> table = mpmd.load_schedule("1f1b", num_stages=2, num_microbatches=4)
    >>> meshes = [Mesh([device], ("data",)) for device in jax.devices()[:2]]
    >>> step = mpmd.pipelined(jax.value_and_grad(loss), table, meshes)
    >>> params = {"first": jnp.ones((3, 8)), "second": jnp.ones((8, 1))}
    >>> batch = {"x": jnp.ones((8, 3)), "y": jnp.zeros((8, 1))}
    >>> params = jax.device_put(params, step.param_shardings(params, batch))
    >>> value, gradients = step(params, batch)  # as jax.value_and_grad(loss)(params, batch)
    >>> [d.id for name in params for d in gradients[name].devices()]
    [0, 1]

`slice_program`, `dump` and `Runner` are the parts that `pipelined` puts together. Letters: S
stages, G chunks (S, or a multiple of it), M microbatches, B rows of a batch.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Literal, TypeVar

import jax
from jax.sharding import Mesh, PartitionSpec

from maxpipe.pipeline.engines.mpmd.marks import mark_stage_boundary
from maxpipe.pipeline.engines.mpmd.own import Arguments, PipelinedProgram, Settings
from maxpipe.pipeline.engines.mpmd.program import Computation, SlicedProgram, UnitName, dump
from maxpipe.pipeline.engines.mpmd.runner import Runner
from maxpipe.pipeline.engines.mpmd.slicing import slice_program
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.table import Table, forward_only
from maxpipe.pipeline.schedules.validate import validate

__all__ = [
    "Computation",
    "Pipelined",
    "Runner",
    "SlicedProgram",
    "Table",
    "UnitName",
    "dump",
    "forward_only",
    "load_schedule",
    "mark_stage_boundary",
    "pipelined",
    "slice_program",
]

ResultT = TypeVar("ResultT")
TreeT = TypeVar("TreeT")
Specs = object  # a PartitionSpec, or a tree of them that is a prefix of the tree of arrays


def pipelined(
    function: Callable[..., ResultT],
    table: Table,
    meshes: Sequence[Mesh],
    *,
    param_specs: Specs | None = None,
    batch_specs: Specs | None = None,
    reduction: Literal["mean", "sum"] = "mean",
) -> "Pipelined[ResultT]":
    """Return a function that runs on all stages and returns what `function` returns.

    `function(params, batch, *shared)` is called with one microbatch at a time; it is
    `jax.value_and_grad(loss)`, also with `has_aux`, or for an evaluation the loss itself. Every
    number that it returns is averaged over the microbatches (`reduction="mean"`) or added up
    ("sum"). So a loss that is a mean over rows equals the whole batch's loss; one that divides by
    a number of tokens, which differs between microbatches, needs "sum" and the divisor of the whole
    batch among `shared`.

    Args:
      function: differentiable in its first argument, with G calls of `mark_stage_boundary`.
      table: the schedule, from `load_schedule`; `forward_only(table)` for an evaluation.
      meshes: for each stage a mesh of its own devices. All have the same axes, whose sizes may
        differ. Axes are treated as `AxisType.Auto`: XLA lays out arrays without a spec.
      param_specs: layout of parameters and of their gradients on the devices of their stage. By
        default replicated.
      batch_specs: layout of each microbatch, such as `PartitionSpec("data")` to divide its rows. By
        default replicated.
      reduction: how results are combined over microbatches.

    Raises:
      ValueError: the table is invalid, meshes do not fit it, or have several devices that no spec
        uses. At a call: marks, table and layouts do not fit together; every message has a remedy.
    """
    return Pipelined(function, table, meshes, param_specs, batch_specs, reduction)


class Pipelined(Generic[ResultT]):
    """A function that runs over stages, the result of `pipelined`.

    A call takes parameters, a batch and further arguments, as the function does:

    - Every array of the batch has B rows, a multiple of M. Microbatch m has the m-th B / M of them.
    - Further arguments are the same for all microbatches, except PRNG keys from `jax.random.key`:
      the index of the microbatch is folded into each, so that dropout masks differ.
    - A parameter is used where it lies if that is where `param_shardings` says, else it is copied
      at every call. Gradients are returned where the parameters belong, in the parameters' dtype;
      sums over microbatches are kept in float32 at least.
    - The function is traced, cut and compiled at the first call with arguments of new shapes.
    """

    def __init__(
        self,
        function: Callable[..., ResultT],
        table: Table,
        meshes: Sequence[Mesh],
        param_specs: Specs | None,
        batch_specs: Specs | None,
        reduction: Literal["mean", "sum"],
    ):
        validate(table)
        _check_meshes(meshes, table)
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction={reduction!r}: must be 'mean' or 'sum'")
        if max(mesh.size for mesh in meshes) > 1 and param_specs is None and batch_specs is None:
            raise ValueError(
                "a stage has several devices, which would all do the same work; say how they share "
                "it, such as batch_specs=PartitionSpec('data'), or set it to PartitionSpec()"
            )
        self.table = table
        # `jax.make_mesh` makes explicit axes, which fix layouts while tracing. A traced program
        # belongs to no mesh yet.
        self.meshes = tuple(Mesh(mesh.devices, mesh.axis_names) for mesh in meshes)
        self._function = function
        self._settings = Settings(
            table,
            self.meshes,
            PartitionSpec() if param_specs is None else param_specs,
            PartitionSpec() if batch_specs is None else batch_specs,
            is_mean=reduction == "mean",
        )
        self._programs: dict[object, PipelinedProgram[ResultT]] = {}

    def __call__(self, params: object, batch: object, *shared: object) -> ResultT:
        arguments = Arguments(params, batch, shared)
        return self._program(arguments).run(arguments)

    def param_shardings(self, params: TreeT, batch: object, *shared: object) -> TreeT:
        """Return where each parameter belongs, a tree of `NamedSharding`s for `jax.device_put`.

        It belongs on the first stage whose forward reads it. Later stages that read it as well,
        such as with tied weights, get a copy at each call.
        """
        program = self._program(Arguments(params, batch, shared))
        return jax.tree.unflatten(jax.tree.structure(params), program.param_shardings)

    def sliced(self, params: object, batch: object, *shared: object) -> SlicedProgram:
        """Return the parts into which the function is cut; `dump` shows them as text."""
        return self._program(Arguments(params, batch, shared)).sliced

    def by_stage(self, tree: TreeT) -> list[TreeT]:
        """Divide a tree of arrays into one per stage, with None for the arrays of other stages.

        Parameters and their gradients are divided alike, so that an optimizer can run on each
        stage, compiled.

        Raises:
          ValueError: an array lies on no stage.
        """
        devices = [frozenset(mesh.devices.flat) for mesh in self.meshes]

        def stage_of(path: jax.tree_util.KeyPath, x: jax.Array) -> int:
            lies_on = frozenset(x.devices()) if isinstance(x, jax.Array) else frozenset()
            if lies_on not in devices:
                name = jax.tree_util.keystr(path)
                remedy = "jax.device_put(params, step.param_shardings(params, batch))"
                raise ValueError(f"array {name} does not lie on a stage; put all there by {remedy}")
            return devices.index(lies_on)

        stages = jax.tree_util.tree_map_with_path(stage_of, tree)
        return [
            jax.tree.map(lambda x, owner, stage=stage: x if owner == stage else None, tree, stages)
            for stage in range(len(self.meshes))
        ]

    def join(self, trees: Iterable[TreeT]) -> TreeT:
        """Return the tree that `by_stage` divided."""
        return jax.tree.map(
            lambda *leaves: next((leaf for leaf in leaves if leaf is not None), None),
            *trees,
            is_leaf=lambda leaf: leaf is None,
        )

    def _program(self, arguments: Arguments) -> PipelinedProgram[ResultT]:
        shapes = arguments.shapes()
        leaves, tree = jax.tree.flatten(shapes)
        key = tree, tuple((x.shape, x.dtype, x.weak_type) for x in leaves)
        if key not in self._programs:
            self._programs[key] = PipelinedProgram(self._function, shapes, self._settings)
        return self._programs[key]


def _check_meshes(meshes: Sequence[Mesh], table: Table) -> None:
    if len(meshes) != table.num_stages:
        raise ValueError(
            f"there are {len(meshes)} meshes, but the table ({table.name}) has {table.num_stages} "
            f"stages; give one mesh for each stage"
        )
    # One PartitionSpec says how an array lies before and after a transfer between stages.
    if len({mesh.axis_names for mesh in meshes}) > 1:
        raise ValueError(
            "the meshes differ in their axes; give all the same names, with size 1 for an axis "
            "that a stage does not use"
        )
    # Stages that share a device would take turns on it, which no schedule foresees.
    devices = [device for mesh in meshes for device in mesh.devices.flat]
    here = jax.process_index()
    if len({*devices}) < len(devices) or any(d.process_index != here for d in devices):
        raise ValueError(
            "give each stage devices of its own, of this process, which drives all stages "
            "(jax.config.update('jax_num_cpu_devices', N) simulates N of them)"
        )
