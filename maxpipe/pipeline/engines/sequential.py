"""Run the model without a pipeline: a scan over layers, with gradients summed over microbatches.

This is the sequential engine, the reference that every other engine is compared with. Letters: see
`maxpipe.pipeline`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.model.layers import AuxiliaryLosses
from maxpipe.model.parameters import Params, trainable, with_trainable
from maxpipe.pipeline import microbatches
from maxpipe.pipeline.chunk import (
    apply_first_layers,
    apply_layers,
    checkpoint,
    layer_function,
    remat_policy,
)
from maxpipe.pipeline.engines.base import (
    Batch,
    EngineInputs,
    Metrics,
    SpmdEngine,
    add,
    float32_zeros,
    metrics_of,
    sum_of,
)
from maxpipe.pipeline.weights import Weights


class SequentialEngine(SpmdEngine):
    """All layers in model order on every device; see `engines.base.Engine`."""

    layer_axes = ("layers_per_stage",)

    def __init__(self, inputs: EngineInputs):
        self._program = inputs.program
        self._rules = inputs.rules
        self._num_microbatches = inputs.config.num_microbatches
        self._context = inputs.context
        self._num_layers = inputs.layout.num_layers
        self._scan = inputs.config.scan_layers
        self.weights = Weights(
            inputs.rules, inputs.program.specs, self.layer_axes, (self._num_layers,)
        )
        # Without a loop over layers XLA moves their gathers before the loop over microbatches and
        # holds the results; gathers inside rematerialisation would run again for each microbatch.
        self._gathers_before_loop = not self._scan and self._num_microbatches > 1
        prepare = (lambda layer: layer) if self._gathers_before_loop else self._prepare
        # Padding layers only make stages even, and there are no stages here.
        layer_fn = layer_function(inputs.program, prepare, padded=False)
        self._policy = remat_policy(inputs.config)
        is_loop = self._scan and self._num_layers > 1
        # Where everything is saved, only casts and gathers of weights are recomputed. XLA may merge
        # these with the forward's: preventing that would copy everything that is saved.
        is_kept_apart = not (is_loop or self._policy.everything)
        self._layer_fn = checkpoint(layer_fn, self._policy, prevent_cse=is_kept_apart)

    def to_canonical(self, leaf: jax.Array) -> jax.Array:
        return leaf

    def from_canonical(self, leaf: jax.Array) -> jax.Array:
        return leaf

    def layer_index(self) -> np.ndarray:
        return np.arange(self._num_layers, dtype=np.int32)

    def loss_and_gradients(
        self, params: Params, batch: Batch, key: jax.Array
    ) -> tuple[Metrics, Params]:
        # 1. The divisors of the loss are known before any microbatch is computed.
        batch = microbatches.prepared(batch, self._context)
        weight = microbatches.weight_sum(batch)
        num_sequences = batch["tokens"].shape[0]

        # The divisors are global, so the losses of microbatches add up to the batch's loss.
        def loss(moving: Params, micro: Batch) -> tuple[jax.Array, Metrics]:
            loss_sum, _, aux = self._forward(with_trainable(params, moving), micro, key)
            metrics = metrics_of(loss_sum / weight, aux, 1 / num_sequences)
            return sum_of(metrics), metrics

        moving = trainable(self._program.specs, params)

        def compute(micro: Batch) -> tuple[Metrics, Params]:
            (_, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(moving, micro)
            return metrics, gradients

        def accumulate(
            total: tuple[Metrics, Params], micro: Batch
        ) -> tuple[tuple[Metrics, Params], None]:
            return jax.tree.map(add, total, compute(micro)), None

        # 2. Sum loss and gradients over microbatches [M, B, ...], in float32, unless M = 1.
        if self._num_microbatches == 1:
            return compute(batch)
        no_metrics = metrics_of(jnp.zeros(()), self._program.no_auxiliary(), 1.0)
        zero = no_metrics, float32_zeros(moving)
        split = microbatches.split(batch, self._num_microbatches)
        return jax.lax.scan(accumulate, zero, split)[0]

    def evaluate(self, params: Params, batch: Batch) -> Metrics:
        # An evaluation batch may have any size; rows of weight 0 make it divisible.
        batch = microbatches.pad_rows(
            batch, self._num_microbatches * self._rules.size("activation_batch")
        )
        batch = microbatches.prepared(batch, self._context)

        def accumulate(total: jax.Array, micro: Batch) -> tuple[jax.Array, None]:
            return total + self._forward(params, micro, None)[1], None

        micro = microbatches.split(batch, self._num_microbatches)  # [M, B, ...]
        cross_entropy, _ = jax.lax.scan(accumulate, jnp.zeros(()), micro)
        return {"cross_entropy": cross_entropy, "weight": jnp.sum(batch["weights"])}

    def _forward(
        self, params: Params, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, AuxiliaryLosses]:
        # Embedding and head, in the compute dtype, gathered over axes that split storage.
        outer = self.weights.gather_outer(
            self._program.cast({n: params[n] for n in ("embed", "head")})
        )
        axes = ("activation_batch", "activation_length", None)
        x = self._rules.constrain(self._program.embed(outer, batch["tokens"]), axes)
        side, first = microbatches.side_inputs(batch), outer["embed"].get("first", {})
        x = apply_first_layers(self._program, first, lambda p: p, self._policy, x, side, key)
        index, layers = jnp.asarray(self.layer_index()), params["layers"]
        if self._gathers_before_loop:
            layers = tuple(
                self._prepare(jax.tree.map(lambda p, i=i: p[i], layers))
                for i in range(self._num_layers)
            )
        x, aux = apply_layers(self._layer_fn, layers, index, x, side, key, scan=self._scan)
        # Its backward follows at once: recomputed logits would take as much memory as saved ones.
        loss, cross_entropy = self._program.head_loss(
            outer, self._rules.constrain(x, axes), batch["targets"], batch["weights"]
        )
        return loss, cross_entropy, aux

    def _prepare(self, layer: Params) -> Params:
        return self.weights.gather_layer(self._program.cast(layer))
