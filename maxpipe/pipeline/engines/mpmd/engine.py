"""Run programs per stage on separate sub-meshes in the order of any table: the mpmd engine.

The design is Alpa's (Zheng et al., OSDI 2022). `model` is the loss of one microbatch as one program
with a mark (`marks`) after each chunk; `slicing` cuts its gradient at the marks into computations
(`program`); `runner` compiles them for the stages and dispatches them in the order of any table;
`staged` joins these for a batch. Letters: B sequences, T tokens.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath, keystr

from maxpipe.devices.mesh import stage_meshes
from maxpipe.devices.transfers import absent, is_here, processes_of, send
from maxpipe.model.parameters import Params, trainable, with_trainable
from maxpipe.pipeline import microbatches
from maxpipe.pipeline.engines.base import Batch, Engine, EngineInputs, Metrics
from maxpipe.pipeline.engines.mpmd.model import MarkedModel
from maxpipe.pipeline.engines.mpmd.program import UnitName, dump
from maxpipe.pipeline.engines.mpmd.row_parallel import RowParallel, check_gather, manual_axes
from maxpipe.pipeline.engines.mpmd.runner import Observer, Sums
from maxpipe.pipeline.engines.mpmd.stage_clock import StageClock
from maxpipe.pipeline.engines.mpmd.staged import (
    Arguments,
    ArraysByPath,
    CompiledUnit,
    StagedProgram,
    local_view,
)
from maxpipe.pipeline.schedules.table import forward_only
from maxpipe.pipeline.weights import gather_of

StageParams = tuple[Params, ...]  # for each stage, the parameters that it owns
ChunkArrays = tuple[jax.Array, ...]  # one layer parameter: for each chunk [its layers, ...]

TreeT = TypeVar("TreeT")

LOSS = 0  # index among the outputs; auxiliary losses and the gradients of the parameters follow


class MpmdEngine(Engine[StageParams, ChunkArrays]):
    """Compute losses and gradients with a program per chunk and direction.

    Live parameters are a tuple: for each stage the part of the tree that it owns, on its sub-mesh
    (see `MarkedModel`). A parameter that several stages read (tied embeddings) is owned by one of
    them, and copied to the others for each call.

    Attributes:
      batch_spec: layout of batches over the mesh of all stages.
      abstract: for each stage, shapes, dtypes and shardings of the parameters that it owns.
      training: the sliced gradient.
      observer: function called for each dispatched unit of a training step, or None.
      clocks: clock of each stage of this process that is to be timed in training steps.
    """

    layer_axes = ("layers_per_stage",)

    def __init__(self, inputs: EngineInputs):
        assert inputs.table is not None
        self.table = inputs.table
        self.meshes = stage_meshes(inputs.mesh)
        stage_of_chunk = self.table.stage_of_chunk.tolist()
        self.loss_stage = stage_of_chunk[-1]
        self._homes = _homes(self.meshes, self.loss_stage)
        is_once = inputs.config.fsdp_gather == "once"
        narrows = inputs.program.config.narrows_parameters
        # Mesh axes along which the devices of a stage have rows of their own.
        manual = manual_axes(inputs.rules, once=is_once and narrows)
        check_gather(inputs.config.fsdp_gather, manual, inputs.rules)
        self.model = MarkedModel(inputs, stage_of_chunk, manual)
        self.observer: Observer | None = None
        self.clocks: dict[int, StageClock] = {}
        self._row_multiple = self.table.num_microbatches * inputs.rules.size("activation_batch")
        self.batch_spec = inputs.rules.spec(("activation_batch", "activation_length"))
        self._needs_key = inputs.program.needs_key
        self._losses = ["loss", *inputs.program.auxiliary_names]
        # 1. Ownership of parameters: the owner has the copy that is updated, and other stages get
        # theirs in every step.
        self.abstract: StageParams = tuple(
            self.model.abstract(stage, mesh) for stage, mesh in enumerate(self.meshes)
        )
        owned = [
            (s, path, p) for s, t in enumerate(self.abstract) for path, p in _params(t).items()
        ]
        self._owner = {path: stage for stage, path, _ in owned}
        self._specs = {path: p.sharding.spec for _, path, p in owned}
        # The traced program knows no stages, so its parameters are shapes without shardings.
        self._all_params = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), _of_all_stages(self.abstract)
        )
        stages = range(len(self.meshes))
        self._all_specs = _of_all_stages([self.model.specs(stage) for stage in stages])
        self._trained_paths = list(_params(trainable(self._all_specs, self._all_params)))
        self._rows: RowParallel | None = None
        if manual:
            dtype = inputs.program.config.dtype
            gathers = {
                path: gather_of(inputs.rules, spec, dtype, manual, self._specs[path])
                for path, spec in _params(self._all_specs).items()
            }
            # Equally wide copies of weights that no axis splits would only take memory.
            is_split = any(gather.gathered_axes for gather in gathers.values())
            self._rows = RowParallel(manual, gathers, is_once and (is_split or narrows))
        # 2. The programs. Evaluations are traced when a batch of a new shape comes.
        dtypes = dict.fromkeys(microbatches.ARRAYS, jnp.int32) | {"weights": jnp.float32}
        self.training = self._training_program(
            {n: jax.ShapeDtypeStruct(inputs.batch_shape, dtype) for n, dtype in dtypes.items()}
        )
        self._evaluations: dict[tuple[int, ...], StagedProgram] = {}
        self._add = jax.jit(jnp.add, donate_argnums=0)

    def layer_index(self) -> tuple[np.ndarray, ...]:
        return self.model.layer_index

    def to_canonical(self, leaf: ChunkArrays) -> np.ndarray:
        # [L, ...] of each chunk -> [N, ...]; on the host, since chunks lie on different devices.
        return np.concatenate([np.asarray(layers) for layers in leaf])

    def from_canonical(self, leaf: jax.Array) -> ChunkArrays:
        return tuple(self.layers_of(chunk, leaf) for chunk in range(self.table.num_chunks))

    def layers_of(self, chunk: int, leaf: jax.Array) -> jax.Array:
        index = self.model.layer_index[chunk]
        return leaf[int(index[0]) : int(index[-1]) + 1]

    def loss_and_gradients(
        self, params: StageParams, batch: Batch, key: jax.Array
    ) -> tuple[Metrics, StageParams]:
        # 1. Run all units; each stage has sums of what its own units add to.
        keys = self._keys(key)
        arguments = self._arguments(params, self.training)
        sums = self.training.run(arguments, batch, keys, self.observer, self.clocks)
        metrics = {name: self._total(sums, output) for output, name in enumerate(self._losses)}
        # 2. Bring to its owner each gradient of a parameter that several stages read, and the zeros
        # of those without a gradient, from the stage of the last backward. They follow the losses.
        first = len(metrics)
        for stage, stage_sums in enumerate(sums):
            # JAX numbers transfers, and the order of a dictionary differs between processes.
            for output in sorted(stage_sums):
                path = self._trained_paths[output - first]
                owner = self._owner[path]
                if owner != stage:
                    part = self._on_stage(stage_sums.pop(output), owner)
                    own = sums[owner].get(output)
                    sums[owner][output] = part if own is None else self._sum(owner, own, part)
        # 3. Arrange the gradients like the parameters.
        output_of = {path: first + i for i, path in enumerate(self._trained_paths)}
        gradients = []
        for stage, tree in enumerate(self.abstract):
            trained = trainable(self.model.specs(stage), tree)
            leaves = [sums[stage][output_of[path]] for path in _params(trained)]
            gradients.append(jax.tree.unflatten(jax.tree.structure(trained), leaves))
        return metrics, tuple(gradients)

    def evaluate(self, params: StageParams, batch: Batch) -> Metrics:
        # The sum before padding; the rows that padding adds have weight 0 in any case.
        weight = self.total_weight(batch["weights"])
        batch = _padded(batch, self._row_multiple)
        shape = batch["tokens"].shape
        if shape not in self._evaluations:
            shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
            self._evaluations[shape] = self._evaluation_program(shapes)
        program = self._evaluations[shape]
        sums = program.run(self._arguments(params, program), batch, [None] * len(self.meshes))
        return {"cross_entropy": sums[self.loss_stage][LOSS], "weight": weight}

    def total_weight(self, weights: jax.Array) -> jax.Array:
        """Sum the weights of a batch on the stage of the loss, which has the whole batch."""
        mesh = self.meshes[self.loss_stage]
        if is_here(mesh):
            return _total(local_view(weights, mesh))
        sharding = NamedSharding(mesh, PartitionSpec())
        return absent(jax.ShapeDtypeStruct((), weights.dtype, sharding=sharding))

    def everywhere(self, arrays: TreeT) -> TreeT:
        """Return copies of the loss stage's arrays, replicated over a stage of this process.

        Every process calls this, and each gets a copy on one of its own stages.
        """
        own, tree = jax.tree.flatten(arrays)
        leaves = own
        for stage in self._homes[1:]:
            # Absent copies are of no use, so only the process of that stage takes them.
            sharding = NamedSharding(self.meshes[stage], PartitionSpec())
            copies = send(leaves, [sharding] * len(leaves))
            own = copies if is_here(self.meshes[stage]) else own
        return jax.tree.unflatten(tree, own)

    def compile(
        self, names: Collection[UnitName] | None = None, meshes: Sequence[Mesh] | None = None
    ) -> Iterator[CompiledUnit]:
        """Compile the training step as `StagedProgram.compile` does, perhaps for other devices."""
        training = self.training if meshes is None else self.training.placed_on(meshes)
        return training.compile(names)

    def texts(self) -> dict[UnitName, str]:
        program, runner = self.training.program, self.training.runner
        inputs = [keystr(path) for path in self.training.paths]
        paths = self._trained_paths
        outputs = [*self._losses, *(f"gradient of {keystr(path)}" for path in paths)]
        texts = dump(program, inputs, outputs)
        name_of = dict(zip(program.inputs, inputs, strict=True))
        # These run once for each chunk, so they are not units of the sliced program.
        for chunk, (gathered, _) in runner.gathers.items():
            lines = [f"  gathers {name_of[v]}\n" for v in gathered]
            texts[UnitName("gather", chunk)] = f"gather{chunk}\n{''.join(lines)}"
        for chunk, (reduced, _) in runner.reductions.items():
            lines = [f"  sums {outputs[output]} over devices\n" for output in reduced]
            texts[UnitName("reduce", chunk)] = f"reduce{chunk}\n{''.join(lines)}"
        return texts

    def _total(self, sums: Sums, output: int) -> jax.Array:
        parts = [
            self._on_stage(of_stage.pop(output), self.loss_stage)
            for of_stage in sums
            if output in of_stage
        ]
        total = parts[0]
        for part in parts[1:]:
            total = self._sum(self.loss_stage, total, part)
        return total

    def _sum(self, stage: int, total: jax.Array, part: jax.Array) -> jax.Array:
        return self._add(total, part) if is_here(self.meshes[stage]) else total

    def _keys(self, key: jax.Array) -> list[jax.Array | None]:
        if not self._needs_key:
            return [None] * len(self.meshes)
        data = jax.random.key_data(key)
        # Stages have no device in common, so each gets a copy.
        return [
            jax.device_put(data, NamedSharding(mesh, PartitionSpec())) if is_here(mesh) else None
            for mesh in self.meshes
        ]

    def _training_program(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> StagedProgram:
        def loss_and_gradients(arguments: Arguments) -> tuple[list[jax.Array], Params]:
            data = arguments["key"]
            key = None if data is None else jax.random.wrap_key_data(data)
            fixed = arguments["micro"], arguments["scales"], key
            params = arguments["params"]

            def loss(moving: Params) -> tuple[jax.Array, Metrics]:
                return self.model.loss(with_trainable(params, moving), *fixed)

            moving = trainable(self._all_specs, params)
            (_, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(moving)
            return [metrics[name] for name in self._losses], gradients

        return StagedProgram(
            loss_and_gradients,
            self._all_params,
            batch,
            self.table,
            self.meshes,
            batch_spec=self.batch_spec,
            param_specs=self._specs,
            outputs=[*[None] * len(self._losses), *self._trained_paths],
            rows=self._rows,
            needs_key=self._needs_key,
            offloaded=self.model.offloaded,
        )

    def _evaluation_program(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> StagedProgram:
        def cross_entropy(arguments: Arguments) -> jax.Array:
            return self.model.cross_entropy(arguments["params"], arguments["micro"])

        return StagedProgram(
            cross_entropy,
            self._all_params,
            batch,
            # The same stages as in training, so that parameters stay where they are.
            forward_only(self.table),
            self.meshes,
            batch_spec=self.batch_spec,
            param_specs=self._specs,
            outputs=[None],
            rows=self._rows,
        )

    def _arguments(self, params: StageParams, program: StagedProgram) -> list[ArraysByPath]:
        """Return for each stage the parameters that it reads, copies of those that another owns."""
        owned = list(map(_params, params))

        def array(path: KeyPath, stage: int) -> jax.Array:
            owner = self._owner[path]
            x: jax.Array = owned[owner][path]
            return x if owner == stage else self._on_stage(x, stage)

        return [
            {path: array(path, stage) for path in program.needed_params(stage)}
            for stage in range(len(self.meshes))
        ]

    def _on_stage(self, x: jax.Array, stage: int) -> jax.Array:
        assert isinstance(x.sharding, NamedSharding)
        (copy,) = send([x], [NamedSharding(self.meshes[stage], x.sharding.spec)])
        return copy


def _params(tree: Params) -> dict[KeyPath, Any]:
    # By the paths that they have in `Arguments`.
    return dict(jax.tree_util.tree_leaves_with_path({"params": tree}))


def _of_all_stages(parts: Sequence[Params]) -> Params:
    tree = {name: part for of_stage in parts for name, part in of_stage.items()}
    # Several stages have chunks, but the line above keeps only those of the last.
    chunks = {c: layers for of_stage in parts for c, layers in of_stage["chunks"].items()}
    return tree | {"chunks": chunks}


def _homes(meshes: Sequence[Mesh], first: int) -> list[int]:
    """Return stages such that each process has one: `first`, and then as few others as possible."""
    homes, reached = [first], processes_of(meshes[first])
    for stage, mesh in enumerate(meshes):
        if not processes_of(mesh) <= reached:
            homes.append(stage)
            reached |= processes_of(mesh)
    return homes


@jax.jit
def _total(weights: jax.Array) -> jax.Array:
    return jnp.sum(weights)


def _padded(batch: Batch, multiple: int) -> Batch:
    """Pad the rows as `microbatches.pad_rows` does, keeping the layout of the batch."""
    if batch["tokens"].shape[0] % multiple == 0:
        return batch
    # Stages cut their microbatches out of shards, which padding must leave in place.
    shardings = {name: x.sharding for name, x in batch.items()}
    pad = jax.jit(microbatches.pad_rows, static_argnums=1, out_shardings=shardings)
    return pad(batch, multiple)
