"""Build the model as one marked program over a microbatch, and say which part each stage owns.

Parameters of the program are {"embed", "chunks": {global chunk: layers}, "head"}, layer leaves
[L, ...]; a stage owns the part of that tree that its chunks read. Letters: L layers of a chunk, B
sequences of a microbatch, T tokens of each, D embed.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from maxpipe.model import parameters
from maxpipe.model.layers import AuxiliaryLosses, SideInputs
from maxpipe.model.parameters import Params, map_specs
from maxpipe.pipeline import microbatches
from maxpipe.pipeline.chunk import (
    Remat,
    apply_first_layers,
    apply_layers,
    layer_function,
    offloaded_names,
    remat_policy,
    saved_on_device,
)
from maxpipe.pipeline.engines.base import Batch, EngineInputs, Metrics, metrics_of, sum_of
from maxpipe.pipeline.engines.mpmd.marks import mark_stage_boundary
from maxpipe.pipeline.manual import GatherTree, gather_tree
from maxpipe.pipeline.weights import Weights, gather_of

TreeT = TypeVar("TreeT")
StageTree: TypeAlias = dict[str, TreeT | dict[int, TreeT]]

AXES = ("activation_batch", "activation_length", None)


class MarkedModel:
    """Compute losses of one microbatch, with a stage mark after each chunk.

    Args:
      inputs: as for every engine; the rules are bound to the abstract mesh of a stage.
      manual: mesh axes over which the losses are manual; their parameters are then one device's
        parts, or with `fsdp_gather=once` gathered already.

    Attributes:
      layer_index: indices of each chunk's layers in model order, int32 [L] each.
      offloaded: names of tensors that the runner moves to the host's memory and back.
    """

    def __init__(
        self, inputs: EngineInputs, stage_of_chunk: Sequence[int], manual: Collection[str] = ()
    ):
        self._program = inputs.program
        self._rules = inputs.rules
        self._scan = inputs.config.scan_layers_per_stage
        self._policy = saved_on_device(remat_policy(inputs.config))
        self._remat = Remat(inputs.config, self._policy)
        self.offloaded = offloaded_names(inputs.config)
        self._stage_of_chunk = stage_of_chunk
        # Chunks may differ in their number of layers, and with it in shapes and shardings.
        sizes = inputs.layout.chunk_sizes
        self._weights = [
            Weights(inputs.rules, inputs.program.specs, ("layers_per_stage",), (size,))
            for size in sizes
        ]
        self._gathers: dict[str, GatherTree] | None = None
        if manual and inputs.config.fsdp_gather != "once":
            gather = partial(gather_of, inputs.rules, dtype=inputs.program.config.dtype)
            self._gathers = map_specs(partial(gather, manual=manual), inputs.program.specs)
        # Chunks hold consecutive layers in model order: each ends at the sum of the sizes so far.
        self.layer_index = tuple(
            np.arange(end - size, end, dtype=np.int32)
            for end, size in zip(np.cumsum(sizes), sizes, strict=True)
        )

    def owned(
        self, stage: int, embed: TreeT, chunk: Callable[[int], TreeT], head: TreeT
    ) -> StageTree[TreeT]:
        """Return the part of a tree like the parameters that a stage owns."""
        chunks = {c: chunk(c) for c, owner in enumerate(self._stage_of_chunk) if owner == stage}
        tree: StageTree[TreeT] = {"chunks": chunks}
        # Tied embeddings belong to the first stage too; the engine copies them to the last.
        if stage == self._stage_of_chunk[0]:
            tree["embed"] = embed
        if stage == self._stage_of_chunk[-1]:
            tree["head"] = head
        return tree

    def specs(self, stage: int) -> Params:
        """Return the `ParamSpec`s of what a stage owns; specs of layers are for a single layer."""
        specs = self._program.specs
        return self.owned(stage, specs["embed"], lambda chunk: specs["layers"], specs["head"])

    def abstract(self, stage: int, mesh: Mesh) -> Params:
        trees = [weights.abstract() for weights in self._weights]

        def on_stage(p: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            # The rules name the abstract mesh that all stages have in common.
            assert isinstance(p.sharding, NamedSharding)
            sharding = NamedSharding(mesh, p.sharding.spec)
            return jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=sharding)

        owned = self.owned(
            stage, trees[0]["embed"], lambda chunk: trees[chunk]["layers"], trees[0]["head"]
        )
        return jax.tree.map(on_stage, owned)

    def init(self, stage: int, key: jax.Array) -> Params:
        # A value depends on seed, parameter and layer: no stage needs what others draw.
        specs = self._program.specs
        outer = parameters.init_params({n: specs[n] for n in ("embed", "head")}, key)

        def layers(chunk: int) -> Params:
            index = jnp.asarray(self.layer_index[chunk])
            return parameters.init_layers(specs["layers"], key, index)

        return self.owned(stage, outer["embed"], layers, outer["head"])

    def loss(
        self,
        params: Params,
        micro: Batch,
        scales: tuple[jax.Array, jax.Array],
        key: jax.Array | None,
    ) -> tuple[jax.Array, Metrics]:
        """Return a microbatch's share of (training loss, metrics whose losses it is the sum of).

        `scales` are factors of the sum of token losses and of the sum of auxiliary losses.
        """
        x, aux = self._forward(params, micro, key, remat=True)
        loss_sum, _ = self._head(params, x, micro)
        # Scaled in each microbatch, so that plain sums over microbatches are global means.
        metrics = metrics_of(loss_sum * scales[0], aux, scales[1])
        return sum_of(metrics), metrics

    def cross_entropy(self, params: Params, micro: Batch) -> jax.Array:
        x, _ = self._forward(params, micro, None, remat=False)
        return self._head(params, x, micro)[1]

    def _forward(
        self, params: Params, micro: Batch, key: jax.Array | None, *, remat: bool
    ) -> tuple[jax.Array, AuxiliaryLosses]:
        outer, side = self._outer(params), microbatches.side_inputs(micro)
        x = self._rules.constrain(self._program.embed(outer, micro["tokens"]), AXES)
        first = outer["embed"].get("first", {})
        x = apply_first_layers(self._program, first, lambda p: p, self._policy, x, side, key)
        aux = self._program.no_auxiliary()
        # An evaluation has no backward to save anything for.
        chunk_fn = self._remat.iteration(self._chunk) if remat else self._chunk
        for chunk, index in enumerate(self.layer_index):
            fixed = jnp.asarray(index), side, key
            x, chunk_aux = chunk_fn(x, params["chunks"][chunk], fixed)
            aux = jax.tree.map(jnp.add, aux, chunk_aux)
            # What goes through the mark is all that the next stage receives. Auxiliary losses
            # travel along, because the loss is computed on the last stage.
            x, aux = mark_stage_boundary((self._rules.constrain(x, AXES), aux))
        return x, aux

    def _chunk(
        self, x: jax.Array, layers: Params, fixed: tuple[jax.Array, SideInputs, jax.Array | None]
    ) -> tuple[jax.Array, AuxiliaryLosses]:
        index, side, key = fixed
        layer_fn = layer_function(self._program, self._prepare, padded=False)
        layer_fn = self._remat.layer(layer_fn, is_only=index.shape[0] == 1)
        return apply_layers(layer_fn, layers, index, x, side, key, scan=self._scan)

    def _prepare(self, layer: Params) -> Params:
        dtype = self._program.config.dtype
        layer = map_specs(
            lambda spec, weight: without_early_cast(weight, spec.compute_dtype(dtype)),
            self._program.specs["layers"],
            layer,
        )
        if self._gathers is not None:
            layer = gather_tree(self._gathers["layers"], layer)
        # Over the partitioner's axes. One layer has the same specs in every chunk.
        return self._weights[0].gather_layer(self._program.cast(layer))

    def _outer(self, params: Params) -> Params:
        """Return {"embed", "head"} ready for use.

        Each use calls this for itself, so that the gradients of two uses are added in the
        parameter's own dtype.
        """
        outer = {name: params[name] for name in ("embed", "head")}
        if self._gathers is not None:
            outer = {name: gather_tree(self._gathers[name], outer[name]) for name in outer}
        return self._weights[0].gather_outer(self._program.cast(outer))

    def _head(self, params: Params, x: jax.Array, micro: Batch) -> tuple[jax.Array, jax.Array]:
        return self._program.head_loss(self._outer(params), x, micro["targets"], micro["weights"])


def without_early_cast(weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return a weight that XLA does not cast to `dtype` before the layer that uses it.

    XLA would cast the weights of a whole chunk before the first layer, and keep them, instead of
    casting them within products. The gradient passes unchanged, to be scattered where it arises.
    """
    # A weight that needs no cast, such as one gathered before, would only be copied.
    return weight if weight.dtype == dtype else _held_back(weight)


@jax.custom_vjp
def _held_back(weight: jax.Array) -> jax.Array:
    held: jax.Array = jax.lax.optimization_barrier(weight)
    return held


# The forward applies the barrier itself: a backward recomputes a barrier, but would save the result
# of a call.
_held_back.defvjp(
    lambda weight: (jax.lax.optimization_barrier(weight), None), lambda _, gradient: (gradient,)
)
