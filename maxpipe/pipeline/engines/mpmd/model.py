"""The model as one marked program over one microbatch, and where its parameters live.

Parameters of the whole program are {"embed", "chunks": {global chunk: layers}, "head"}, layer
leaves [L, ...]; a stage owns the part of that tree that its chunks read. Letters: L layers of a
chunk, B sequences of a microbatch, T sequence, D embed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxpipe.model import parameters
from maxpipe.model.parameters import Params
from maxpipe.pipeline import microbatches
from maxpipe.pipeline.chunk import apply_layers, layer_function
from maxpipe.pipeline.engines.base import Batch, EngineInputs
from maxpipe.pipeline.engines.mpmd.marks import mark_stage_boundary
from maxpipe.pipeline.remat import Remat
from maxpipe.pipeline.weights import Weights

AXES = ("activation_batch", "activation_length", None)


class MarkedModel:
    """Losses with a stage mark behind every chunk.

    Args:
      parts: as for every pipeline; the rules are bound to the mesh of a stage.
      stage_of_chunk: the stage that holds each chunk.
    """

    def __init__(self, parts: EngineInputs, stage_of_chunk: list[int]):
        self._program = parts.program
        self._rules = parts.rules
        self._scan = parts.config.scan_layers_per_stage
        self._remat = Remat(parts.config)
        self._sizes = parts.layout.chunk_sizes
        self._stage_of = stage_of_chunk
        self._weights = [
            Weights(parts.rules, parts.program.specs, ("layers_per_stage",), (n,))
            for n in self._sizes
        ]
        ends = np.cumsum(self._sizes)
        self.layers = [
            np.arange(end - size, end, dtype=np.int32)
            for end, size in zip(ends, self._sizes, strict=True)
        ]

    def owned(self, stage: int, embed: Any, chunks: Any, head: Any) -> dict[str, Any]:
        """The part of a parameter tree that a stage owns, from its pieces; `chunks` is called with global chunks."""
        tree: dict[str, Any] = {
            "chunks": {c: chunks(c) for c, s in enumerate(self._stage_of) if s == stage}
        }
        if stage == self._stage_of[0]:
            tree["embed"] = embed
        if stage == self._stage_of[-1]:
            tree["head"] = head
        return tree

    def specs(self, stage: int) -> dict[str, Any]:
        """`ParamSpec`s of a stage's own parameters, those of layers for one layer."""
        specs = self._program.specs
        return self.owned(stage, specs["embed"], lambda c: specs["layers"], specs["head"])

    def abstract(self, stage: int, mesh: Mesh) -> dict[str, Any]:
        """Shapes, dtypes and shardings at rest of a stage's own parameters, on the stage's mesh."""
        trees = [weights.abstract() for weights in self._weights]
        owned = self.owned(stage, trees[0]["embed"], lambda c: trees[c]["layers"], trees[0]["head"])

        def one(p: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                p.shape, p.dtype, sharding=NamedSharding(mesh, p.sharding.spec)
            )

        return jax.tree.map(one, owned)

    def init(self, stage: int, key: jax.Array) -> Params:
        """Initial values of a stage's own parameters; they depend on neither stage nor layout."""
        specs = self._program.specs
        outer = parameters.init_params({n: specs[n] for n in ("embed", "head")}, key)
        return self.owned(
            stage,
            outer["embed"],
            lambda c: parameters.init_layers(specs["layers"], key, jnp.asarray(self.layers[c])),
            outer["head"],
        )

    def loss(self, params: Params, micro: Batch, scales: Any, key: jax.Array | None) -> jax.Array:
        """Training loss of a microbatch: token losses by scales[0] plus auxiliary losses by scales[1]."""
        x, aux = self._forward(params, micro, key, remat=True)
        loss_sum, _ = self._head(params, x, micro)
        return loss_sum * scales[0] + aux * scales[1]

    def cross_entropy(self, params: Params, micro: Batch) -> jax.Array:
        """Sum over the tokens of a microbatch."""
        x, _ = self._forward(params, micro, None, remat=False)
        return self._head(params, x, micro)[1]

    def _forward(
        self, params: Params, micro: Batch, key: jax.Array | None, *, remat: bool
    ) -> tuple[jax.Array, jax.Array]:
        x = self._rules.constrain(self._program.embed(self._outer(params), micro["tokens"]), AXES)
        aux = jnp.zeros((), jnp.float32)
        chunk = self._remat.iteration(self._chunk) if remat else self._chunk
        for c, index in enumerate(self.layers):
            rest = jnp.asarray(index), microbatches.side_inputs(micro), key
            x, more = chunk(x, params["chunks"][c], rest)
            x, aux = mark_stage_boundary((self._rules.constrain(x, AXES), aux + more))
        return x, aux

    def _chunk(self, x: jax.Array, layers: Params, rest: Any) -> tuple[jax.Array, jax.Array]:
        index, side, key = rest
        layer_fn = layer_function(self._program, self._prepare, padded=False)
        layer_fn = self._remat.layer(layer_fn, is_only=index.shape[0] == 1)
        return apply_layers(layer_fn, layers, index, x, side, key, scan=self._scan)

    def _prepare(self, layer: Params) -> Params:
        return self._weights[0].gather_layer(self._program.cast(layer))

    def _outer(self, params: Params) -> Params:
        """Made ready anew for every use: the gradients of two uses then meet in the parameter's own dtype."""
        return self._weights[0].gather_outer(
            self._program.cast({n: params[n] for n in ("embed", "head")})
        )

    def _head(self, params: Params, x: jax.Array, micro: Batch) -> tuple[jax.Array, jax.Array]:
        return self._program.head_loss(self._outer(params), x, micro["targets"], micro["weights"])
