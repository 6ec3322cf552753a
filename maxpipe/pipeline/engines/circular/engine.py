"""Run a shift register over stages, as `vmap` in a loop over iterations: the circular engine.

In every iteration all stages compute, each on a different microbatch, and send their outputs to the
next stage (see `conveyor`). The program is written for all stages at once, [S, ...], and XLA's
partitioner splits it. The design is MaxText's circular pipeline; with V = 1 it is GPipe (Huang et
al. 2019). Autodiff of the loop does the backward, unless weights are gathered less often than in
every iteration (see `repeat_gather`). Letters: see `maxpipe.pipeline`.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from maxpipe.config import ConfigError, Problem
from maxpipe.config.catalog import RematPolicy
from maxpipe.model.layers import AuxiliaryLosses, SideInputs
from maxpipe.model.parameters import Params, ParamSpec, map_specs, trainable, with_trainable
from maxpipe.pipeline import microbatches
from maxpipe.pipeline.chunk import Remat, apply_layers, checkpoint, layer_function, remat_policy
from maxpipe.pipeline.engines.base import (
    Batch,
    EngineInputs,
    Metrics,
    SpmdEngine,
    metrics_of,
    sum_of,
)
from maxpipe.pipeline.engines.circular.conveyor import Conveyor, Iteration, State
from maxpipe.pipeline.engines.circular.outside import OutsideLayers
from maxpipe.pipeline.engines.circular.phases import (
    BatchSpecs,
    Iterations,
    StageInputs,
    unfit_rules,
)
from maxpipe.pipeline.engines.circular.repeat_gather import run_iterations
from maxpipe.pipeline.manual import BATCH_AXES, Gather
from maxpipe.pipeline.weights import Weights, gather_of
from maxpipe.sharding.rules import AXIS_RULES_KEY, only, without

# Logical axes of the conveyor [S, K, B, T, D] and of one slot of it [S, B, T, D].
CELLS = ("activation_stage", None, "activation_batch", "activation_length", None)
ACTIVATION = ("activation_stage", "activation_batch", "activation_length", None)


class CircularEngine(SpmdEngine):
    """Pipeline in breadth-first order with any number of stages; see `engines.base.Engine`.

    Args:
      bubble_fill: replaces the output of idle stages; tests pass NaN to prove that nothing
        reads it.

    Raises:
      ConfigError: the axis rules do not suit gathered weights.
    """

    def __init__(self, inputs: EngineInputs, *, bubble_fill: float | None = None):
        self._program = program = inputs.program
        self._rules = rules = inputs.rules
        self._config = config = inputs.config
        self._layout = layout = inputs.layout
        self._mesh = inputs.mesh
        self._context = inputs.context
        self._bubble_fill = bubble_fill
        self.weights = Weights(rules, program.specs, self.layer_axes, layout.shape)
        self._gathers_in_iteration = config.fsdp_gather == "per_iteration"
        if not self._gathers_in_iteration and (reasons := unfit_rules(rules)):
            mode = f"pipeline.fsdp_gather={config.fsdp_gather}"
            raise ConfigError(*(Problem(AXIS_RULES_KEY, f"{mode} {text}") for text in reasons))
        # XLA inlines the body of a loop of one iteration.
        is_loop = config.scan_iterations and layout.num_stages * config.num_microbatches > 1
        self._remat = Remat(config, remat_policy(config), prevent_cse=not is_loop)
        layer_fn = layer_function(program, self._prepare_layer, padded=not layout.is_even)
        self._layer_fn = self._remat.layer(layer_fn, is_only=layout.layers_per_stage == 1)
        self._outside = OutsideLayers(program, rules, config, layout, self.weights)
        self._delay = config.forwarding_delay

    def _prepare_layer(self, layer: Params) -> Params:
        if not self._gathers_in_iteration:
            return layer  # gathered and cast already
        return self.weights.gather_layer(self._program.cast(layer))

    def loss_and_gradients(
        self, params: Params, batch: Batch, key: jax.Array
    ) -> tuple[Metrics, Params]:
        def loss(moving: Params) -> tuple[jax.Array, Metrics]:
            return self.loss(with_trainable(params, moving), batch, key)

        moving = trainable(self._program.specs, params)
        (_, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(moving)
        return metrics, gradients

    def loss(self, params: Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
        """Return (training loss, metrics whose losses it is the sum of), differentiable."""
        loss_sum, _, aux = self._forward(params, batch, key, self._config.num_microbatches)
        loss = loss_sum / microbatches.weight_sum(batch)
        metrics = metrics_of(loss, aux, 1 / batch["tokens"].shape[0])
        return sum_of(metrics), metrics

    def evaluate(self, params: Params, batch: Batch) -> Metrics:
        # The fewest microbatches that the conveyor can hold need the fewest rows of padding.
        shards = self._rules.size("activation_batch")
        fits = batch["tokens"].shape[0] % (shards * self._config.num_microbatches) == 0
        fewest = self._delay * self._layout.num_stages
        num_microbatches = self._config.num_microbatches if fits else fewest
        weight = jnp.sum(batch["weights"])
        batch = microbatches.pad_rows(batch, shards * num_microbatches)
        _, cross_entropy, _ = self._forward(params, batch, None, num_microbatches)
        return {"cross_entropy": cross_entropy, "weight": weight}

    def _forward(
        self, params: Params, batch: Batch, key: jax.Array | None, M: int
    ) -> tuple[jax.Array, jax.Array, AuxiliaryLosses]:
        """Return the sums (loss, cross-entropy, auxiliary losses) of a batch in M microbatches."""
        S, V = self._layout.num_stages, self._layout.num_repeats
        layers, outside_aux = params["layers"], self._program.no_auxiliary()
        # 1. Split the batch, [B, T] -> [M, B / M, T].
        micro = microbatches.split(microbatches.prepared(batch, self._context), M)
        side = microbatches.side_inputs(micro)
        # 2. Embed all microbatches; each stage embeds those that start in its cells.
        outer = self.weights.gather_outer(
            self._program.cast({n: params[n] for n in ("embed", "head")})
        )
        conveyor = Conveyor(S, V, M, self._delay, self._constrain, self._bubble_fill)
        tokens_SKBT = self._constrain_cells(micro["tokens"][conveyor.start])
        io = self._constrain_cells(self._program.embed(outer, tokens_SKBT))  # [S, K, B, T, D]
        # 3. Layers before the pipeline, the pipeline, layers after it.
        if first := outer["embed"].get("first"):
            io = self._outside.first(first, io, self._cells(side, conveyor.start), key)
        if self._layout.num_outside and self._layout.outside_first:
            io, outside_aux = self._outside(layers, io, self._cells(side, conveyor.start), key)
        run = self._run if self._gathers_in_iteration else self._run_gathered
        io, aux = run(layers, io, side, key, conveyor)
        if self._layout.num_outside and not self._layout.outside_first:
            io, outside_aux = self._outside(layers, io, self._cells(side, conveyor.end), key)
        # 4. The head: each stage takes the microbatches that end in its cells.
        targets = self._constrain_cells(micro["targets"][conveyor.end])  # [S, K, B, T]
        weights = self._constrain_cells(micro["weights"][conveyor.end])
        loss, cross_entropy = self._head(outer, io, targets, weights)
        return loss, cross_entropy, jax.tree.map(jnp.add, aux, outside_aux)

    def _run(
        self,
        layers: Params,
        io: jax.Array,
        side: SideInputs,
        key: jax.Array | None,
        conveyor: Conveyor,
    ) -> tuple[jax.Array, AuxiliaryLosses]:
        """Run all iterations, each of which gathers its weights.

        Args:
          layers: live layer parameters [V + E, S, L, ...].
          io: the conveyor with the inputs, [S, K, B, T, D].
          side: side inputs [M, B, ...].

        Returns:
          (the conveyor with the outputs, auxiliary losses).
        """
        stages = self._over_stages(self._select_and_apply, (1, 1, 0, 0, 0, None))
        index = jnp.asarray(self._layout.layer_index)

        def iterate(state: State, t: Iteration) -> tuple[State, None]:
            _, microbatch, repeat = conveyor.units(t)
            x = conveyor.stage_inputs(state, t)
            # [M, B, ...] -> [S, B, ...]
            stage_side = jax.tree.map(lambda a: a[microbatch], side)
            y, aux = stages(layers, index, repeat, x, stage_side, key)
            return conveyor.next_state(state, y, aux, t), None

        state = conveyor.first_state(io, self._program.no_auxiliary())
        if self._config.scan_iterations:
            state, _ = jax.lax.scan(iterate, state, jnp.arange(conveyor.num_iterations))
        else:
            for t in range(conveyor.num_iterations):
                state, _ = iterate(state, t)
        return conveyor.outputs(state), state.aux

    def _run_gathered(
        self,
        layers: Params,
        io: jax.Array,
        side: SideInputs,
        key: jax.Array | None,
        conveyor: Conveyor,
    ) -> tuple[jax.Array, AuxiliaryLosses]:
        """Run all iterations, on weights that are gathered once per repeat, or once; see `_run`."""
        layer_index = np.asarray(self._layout.layer_index)
        over_stages = self._over_stages(self._apply, (0, 0, 0, 0, None))

        def inputs_of(t: Iteration, side: SideInputs, key_data: jax.Array | None) -> StageInputs:
            _, microbatch, repeat = conveyor.units(t)
            key = None if key_data is None else jax.random.wrap_key_data(key_data)
            # [V + E, S, L] -> [S, L]
            index = jnp.asarray(layer_index)[repeat, jnp.arange(conveyor.num_stages)]
            # [M, B, ...] -> [S, B, ...]
            return StageInputs(index, jax.tree.map(lambda a: a[microbatch], side), key)

        def stages(
            x: jax.Array, weights: Params, inputs: StageInputs
        ) -> tuple[jax.Array, AuxiliaryLosses]:
            return over_stages(weights, inputs.layer_index, x, inputs.side, inputs.key)

        iterations = Iterations(
            conveyor,
            stages,
            inputs_of,
            self._program,
            self._config,
            map_specs(self._gather, self._program.specs["layers"]),
            self._batch_specs(side),
            self._mesh,
        )
        # A PRNG key is not an array of numbers, so it enters the manual program as its raw data.
        key_data = None if key is None else jax.random.key_data(key)
        return run_iterations(iterations, layers, io, side, key_data)

    def _gather(self, spec: ParamSpec) -> Gather:
        # Weights stay split over the stages: each gathers its own layers.
        at_rest = without(self._rules.spec(spec.axes, spec.shape), ("stage",))
        return gather_of(self._rules, spec, self._program.config.dtype, at_rest=at_rest)

    def _batch_specs(self, side: SideInputs) -> BatchSpecs:
        def batch_part(
            axes: Sequence[str | None], shape: Sequence[int] | None = None
        ) -> PartitionSpec:
            return only(self._rules.spec(axes, shape), BATCH_AXES)

        def layer(spec: ParamSpec) -> PartitionSpec:
            return batch_part(self.layer_axes + spec.axes, self._layout.shape + spec.shape)

        rows = (None, "activation_batch", "activation_length")  # of [M, B, T] or [M, B]
        return BatchSpecs(
            layers=map_specs(layer, self._program.specs["layers"]),
            io=batch_part((None, *rows)),
            side=jax.tree.map(lambda x: batch_part(rows[: x.ndim]), side),
        )

    def _select_and_apply(
        self,
        layers: Params,
        index: jax.Array,
        repeat: jax.Array,
        x: jax.Array,
        side: SideInputs,
        key: jax.Array | None,
    ) -> tuple[jax.Array, AuxiliaryLosses]:
        """Apply one stage's layers of a repeat, from [V, L, ...] layers; see `_apply`."""
        # The selection is inside the rematerialised function, so that no iteration keeps a copy of
        # its weights.
        chunk, index = jax.tree.map(
            lambda p: jax.lax.dynamic_index_in_dim(p, repeat, keepdims=False), (layers, index)
        )
        return self._apply(chunk, index, x, side, key)

    @jax.named_scope("stage")
    def _apply(
        self, chunk: Params, index: jax.Array, x: jax.Array, side: SideInputs, key: jax.Array | None
    ) -> tuple[jax.Array, AuxiliaryLosses]:
        """Apply one stage: layers [L, ...], index [L], x [B, T, D] -> (y, auxiliary losses)."""
        return apply_layers(
            self._layer_fn, chunk, index, x, side, key, scan=self._config.scan_layers_per_stage
        )

    def _over_stages(
        self,
        stage: Callable[..., tuple[jax.Array, AuxiliaryLosses]],
        in_axes: tuple[int | None, ...],
    ) -> Callable[..., tuple[jax.Array, AuxiliaryLosses]]:
        # Given the axes' names, constraints inside `stage` lay the mapped dimension [S] over them.
        names = self._rules.spec(("activation_stage",))[0]
        return jax.vmap(self._remat.iteration(stage), in_axes=in_axes, spmd_axis_name=names)

    def _head(
        self, outer: Params, io: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return (loss sum, cross-entropy sum); logits exist for one slot of cells at a time.

        Each stage computes its own cells, [S, K, B, T(, D)].
        """
        head_loss = checkpoint(self._program.head_loss, RematPolicy())

        def slot(
            total: tuple[jax.Array, jax.Array], xs: tuple[jax.Array, ...]
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            x, targets, weights = xs  # [S, B, T(, D)]
            losses = head_loss(outer, self._constrain(x), targets, weights)
            return jax.tree.map(jnp.add, total, losses), None

        # [S, K, B, T(, D)] -> [K, S, B, T(, D)]
        slots = tuple(jnp.swapaxes(a, 0, 1) for a in (io, targets, weights))
        return jax.lax.scan(slot, (jnp.zeros(()), jnp.zeros(())), slots)[0]

    def _constrain(self, x_SBTD: jax.Array) -> jax.Array:
        return self._rules.constrain(x_SBTD, ACTIVATION)

    def _cells(self, side: SideInputs, microbatch: np.ndarray) -> SideInputs:
        return jax.tree.map(lambda a: self._constrain_cells(a[microbatch]), side)

    def _constrain_cells(self, x: jax.Array) -> jax.Array:
        return self._rules.constrain(x, CELLS[: x.ndim])
