"""The MPMD engine's pipeline: separate programs per stage on separate sub-meshes, driven by a schedule's table.

It is Alpa's design (Zheng et al., OSDI 2022): the loss and gradient of one microbatch are traced as
one program, cut at stage marks, compiled stage by stage, and dispatched in the order of any table.
Letters: B sequences, T sequence.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.model.parameters import Params
from maxpipe.pipeline import microbatches
from maxpipe.pipeline.engines.base import Batch, EngineInputs, Metrics
from maxpipe.pipeline.engines.mpmd.model import MarkedModel
from maxpipe.pipeline.engines.mpmd.program import UnitName, dump
from maxpipe.pipeline.engines.mpmd.runner import Observer
from maxpipe.pipeline.engines.mpmd.staged import ArraysByPath, StagedProgram
from maxpipe.pipeline.engines.mpmd.stages import paths
from maxpipe.pipeline.schedules.table import forward_only

LOSS = 0  # index among the outputs; the gradients of the parameters follow


class MpmdEngine:
    """Losses and gradients over all stages.

    Parameters are a list: for each stage, the part of the tree that it owns (`MarkedModel`), on its
    sub-mesh.

    Args:
      parts: as for every pipeline; the rules are bound to the abstract mesh of a stage.
      meshes: sub-mesh of each stage.
      batch_shape: (B, T) of training batches.

    Attributes:
      abstract: for each stage, shapes, dtypes and shardings of the parameters that it owns.
      training: the sliced program.
      loss_stage: the stage of the loss.
      needs_key: whether the model draws random numbers.
    """

    def __init__(self, parts: EngineInputs, meshes: Sequence[Mesh], batch_shape: tuple[int, int]):
        assert parts.table is not None
        self.table = parts.table
        self._meshes = meshes
        stage_of = self.table.stage_of_chunk.tolist()
        self.loss_stage = stage_of[-1]
        self.model = MarkedModel(parts, stage_of)
        self._row_multiple = self.table.num_microbatches * parts.rules.size("activation_batch")
        self.batch_spec = parts.rules.spec(("activation_batch", "activation_length"))
        self.abstract = [self.model.abstract(s, mesh) for s, mesh in enumerate(meshes)]
        self._owned = [paths({"params": tree}) for tree in self.abstract]
        self._owner = {name: s for s, names in enumerate(self._owned) for name in names}
        whole = {name: tree for stage in self.abstract for name, tree in stage.items()}
        whole["chunks"] = {
            c: tree for stage in self.abstract for c, tree in stage["chunks"].items()
        }
        self._whole = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), whole)
        self._outputs = {name: 1 + i for i, name in enumerate(paths({"params": self._whole}))}
        self.needs_key = parts.program.needs_key
        dtypes = dict.fromkeys(microbatches.ARRAYS, jnp.int32) | {"weights": jnp.float32}
        self.training = self._train_program(
            {n: jax.ShapeDtypeStruct(batch_shape, d) for n, d in dtypes.items()}
        )
        self._evaluations: dict[tuple[int, ...], StagedProgram] = {}
        self._add = jax.jit(jnp.add, donate_argnums=0)

    def copies(self, params: Sequence[Params]) -> list[ArraysByPath]:
        """For each stage, the parameters that it reads and another one owns (tied embeddings), brought there."""
        named = self._named(params)
        return [
            {
                name: self._bring(named[self._owner[name]][name], name, stage)
                for name in sorted(needs - mine.keys())
                if name in self._owner
            }
            for stage, (needs, mine) in enumerate(zip(self.training.needs, named, strict=True))
        ]

    def loss_and_gradients(
        self,
        params: Sequence[Params],
        copies: Sequence[ArraysByPath],
        batch: Batch,
        keys: Sequence[jax.Array | None],
        observe: Observer | None = None,
    ) -> tuple[jax.Array, list[Params]]:
        """Training loss and its gradient.

        Args:
          params: see the class.
          copies: of the parameters, from `copies`.
          batch: as for every pipeline, laid out by `batch_spec` over the mesh of all stages.
          keys: PRNG key of the step on every stage, or None each if not `needs_key`.
          observe: told of every unit that is dispatched.

        Returns:
          (loss, on `loss_stage`; gradients like `params`, float32).
        """
        sums = self.training.run(self._all(params, copies), batch, keys, observe)
        loss = sums[self.loss_stage].pop(LOSS)
        names = {output: name for name, output in self._outputs.items()}
        for stage, parts in enumerate(sums):
            for output in [i for i in parts if self._owner[names[i]] != stage]:
                home = self._owner[names[output]]
                part = self._bring(parts.pop(output), names[output], home)
                sums[home][output] = self._add(sums[home][output], part)
        gradients = [
            jax.tree.unflatten(
                jax.tree.structure(tree), [sums[s][self._outputs[name]] for name in self._owned[s]]
            )
            for s, tree in enumerate(self.abstract)
        ]
        return loss, gradients

    def compile(self) -> Iterator[tuple[int, UnitName, jax.stages.Compiled]]:
        """Compiles the training step's computations without running any; see `StagedProgram.compile`."""
        owned = self._named(self.abstract)
        return self.training.compile(
            {name: x.sharding.spec for stage in owned for name, x in stage.items()}
        )

    def texts(self) -> dict[UnitName, str]:
        """The training step's computations in words and equations; see `dump`."""
        outputs = ["loss", *(f"gradient of {name}" for name in self._outputs)]
        return dump(self.training.program, self.training.input_names, outputs)

    def evaluate(
        self, params: Sequence[Params], copies: Sequence[ArraysByPath], batch: Batch
    ) -> Metrics:
        """Forward only: {"cross_entropy", "weight"}, sums over the tokens of a batch."""
        weight = _total(batch["weights"])
        batch = _padded(batch, self._row_multiple)
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
        shape = batch["tokens"].shape
        if shape not in self._evaluations:
            self._evaluations[shape] = self._evaluation_program(shapes)
        sums = self._evaluations[shape].run(
            self._all(params, copies), batch, [None] * len(self._meshes)
        )
        return {"cross_entropy": sums[self.loss_stage][LOSS], "weight": weight}

    def _train_program(self, batch: Any) -> StagedProgram:
        def f(arguments: Any) -> Any:
            rest = arguments["micro"], arguments["scales"], arguments["key"]
            return jax.value_and_grad(self.model.loss)(arguments["params"], *rest)

        owned = self._named(self.abstract)
        specs = [owned[self._owner[name]][name].sharding.spec for name in self._outputs]
        return StagedProgram(
            f,
            self._whole,
            batch,
            self.table,
            self._meshes,
            self.batch_spec,
            [PartitionSpec(), *specs],
            self.needs_key,
        )

    def _evaluation_program(self, batch: Any) -> StagedProgram:
        def f(arguments: Any) -> jax.Array:
            return self.model.cross_entropy(arguments["params"], arguments["micro"])

        table = forward_only(self.table)
        return StagedProgram(
            f,
            self._whole,
            batch,
            table,
            self._meshes,
            self.batch_spec,
            [PartitionSpec()],
            needs_key=False,
        )

    def _named(self, params: Sequence[Params]) -> list[dict[str, Any]]:
        return [
            dict(zip(n, jax.tree.leaves(tree), strict=True))
            for n, tree in zip(self._owned, params, strict=True)
        ]

    def _all(self, params: Sequence[Params], copies: Sequence[ArraysByPath]) -> list[ArraysByPath]:
        return [
            mine | dict(others) for mine, others in zip(self._named(params), copies, strict=True)
        ]

    def _bring(self, x: jax.Array, name: str, stage: int) -> jax.Array:
        """An array that lies like a parameter, on another stage."""
        assert isinstance(x.sharding, NamedSharding), name
        return jax.device_put(x, NamedSharding(self._meshes[stage], x.sharding.spec))


@jax.jit
def _total(weights: jax.Array) -> jax.Array:
    return jnp.sum(weights)


def _padded(batch: Batch, multiple: int) -> Batch:
    """`microbatches.pad_rows`, with the result laid out like the batch."""
    if batch["tokens"].shape[0] % multiple == 0:
        return batch
    shardings = {name: x.sharding for name, x in batch.items()}
    return jax.jit(microbatches.pad_rows, static_argnums=1, out_shardings=shardings)(
        batch, multiple
    )
