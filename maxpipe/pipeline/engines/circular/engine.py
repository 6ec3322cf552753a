"""The circular engine: one shift register (see `conveyor`), auto-sharded `vmap` over stages, a loop over iterations.

The design is MaxText's circular pipeline; with V = 1 it is GPipe. Autodiff of the loop does the
backward, unless weights are gathered less often than in every iteration (see `repeat_gather`).

Letters: S stages, V repeats, L layers per stage, M microbatches, K = M / S, B sequences of a
microbatch, T sequence, D embed. `x_SBTD` has one microbatch's activations for every stage.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.config import ConfigError, Problem
from maxpipe.config.catalog import RematPolicy
from maxpipe.model.parameters import Params, ParamSpec, map_specs
from maxpipe.pipeline import microbatches
from maxpipe.pipeline.chunk import apply_layers, layer_function
from maxpipe.pipeline.engines.base import Batch, EngineInputs, Metrics, SpmdEngine
from maxpipe.pipeline.engines.circular.conveyor import Conveyor, State
from maxpipe.pipeline.engines.circular.outside import OutsideLayers
from maxpipe.pipeline.engines.circular.repeat_gather import RepeatGather, Sharding
from maxpipe.pipeline.manual import BATCH_AXES, ROW_AXES, Gather
from maxpipe.pipeline.remat import Remat, checkpoint
from maxpipe.pipeline.weights import Weights
from maxpipe.sharding.rules import KEY, only, without

CELLS = ("activation_stage", None, "activation_batch", "activation_length", None)
ACTIVATION = ("activation_stage", "activation_batch", "activation_length", None)


class CircularEngine(SpmdEngine):
    """See `contract.Pipeline`.

    Args:
      parts: program, rules, configuration, layout.
      bubble_fill: if given, what idle stages produce; tests fill bubbles with NaN to prove that
        nothing reads them.
    """

    layer_axes = ("repeat", "stage", "layers_per_stage")

    def __init__(self, parts: EngineInputs, *, bubble_fill: float | None = None):
        self._program = parts.program
        self._rules = parts.rules
        self._config = parts.config
        self._layout = parts.layout
        self._context = parts.context
        self._bubble_fill = bubble_fill
        self.weights = Weights(
            parts.rules, parts.program.specs, self.layer_axes, parts.layout.shape
        )
        self._gathers_in_iteration = parts.config.fsdp_gather == "per_iteration"
        if not self._gathers_in_iteration:
            self._check_rows()
        self._remat = Remat(parts.config)
        layer_fn = layer_function(parts.program, self._prepare, padded=not parts.layout.is_even)
        self._layer_fn = self._remat.layer(layer_fn, is_only=parts.layout.layers_per_stage == 1)
        self._outside = OutsideLayers(
            parts.program, parts.rules, parts.config, parts.layout, self.weights
        )
        self._delay = 2 if parts.config.delay_activation_forwarding else 1

    def _check_rows(self) -> None:
        """Gradients that are added up on each device must be of rows that no other device has."""
        mesh_axes = self._rules.spec(("activation_batch",))[0] or ()
        given = {mesh_axes} if isinstance(mesh_axes, str) else set(mesh_axes)
        wanted = [axis for axis in ROW_AXES if self._rules.mesh.shape[axis] > 1]
        if given != set(wanted):
            text = f"pipeline.fsdp_gather={self._config.fsdp_gather} needs rows over all of {', '.join(ROW_AXES)}"
            raise ConfigError(
                Problem(KEY, f"{text}; use [activation_batch, [{', '.join(ROW_AXES)}]]")
            )

    def _prepare(self, layer: Params) -> Params:
        return (
            self.weights.gather_layer(self._program.cast(layer))
            if self._gathers_in_iteration
            else layer
        )

    def layer_index(self) -> np.ndarray:
        return self._layout.layer_index

    def to_canonical(self, leaf: jax.Array) -> jax.Array:
        return self._layout.to_canonical(leaf)

    def from_canonical(self, leaf: jax.Array) -> jax.Array:
        return self._layout.from_canonical(leaf)

    def loss_and_gradients(
        self, params: Params, batch: Batch, key: jax.Array
    ) -> tuple[Metrics, Params]:
        value, gradients = jax.value_and_grad(self.loss)(params, batch, key)
        return {"loss": value}, gradients

    def loss(self, params: Params, batch: Batch, key: jax.Array) -> jax.Array:
        """The loss of `loss_and_gradients`, differentiable."""
        loss_sum, _, aux = self._forward(params, batch, key, self._config.num_microbatches)
        return loss_sum / microbatches.weight_sum(batch) + aux / batch["tokens"].shape[0]

    def evaluate(self, params: Params, batch: Batch) -> Metrics:
        shards, least = self._rules.size("activation_batch"), self._delay * self._layout.num_stages
        fits = batch["tokens"].shape[0] % (shards * self._config.num_microbatches) == 0
        num_microbatches = self._config.num_microbatches if fits else least
        weight = jnp.sum(batch["weights"])
        batch = microbatches.pad_rows(batch, shards * num_microbatches)
        _, cross_entropy, _ = self._forward(params, batch, None, num_microbatches)
        return {"cross_entropy": cross_entropy, "weight": weight}

    def _forward(
        self, params: Params, batch: Batch, key: jax.Array | None, M: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(loss sum, cross-entropy sum, auxiliary loss sum) of a global batch in M microbatches."""
        S, V = self._layout.num_stages, self._layout.num_repeats
        micro = microbatches.split(microbatches.prepared(batch, self._context), M)
        outer = self.weights.gather_outer(
            self._program.cast({n: params[n] for n in ("embed", "head")})
        )
        conveyor = Conveyor(S, V, M, self._delay, self._constrain, self._bubble_fill)
        tokens_SKBT = self._over_stages(micro["tokens"][conveyor.start])
        io = self._over_stages(self._program.embed(outer, tokens_SKBT))
        side = microbatches.side_inputs(micro)
        layers, outside_aux = params["layers"], jnp.zeros(())
        if self._layout.num_outside and self._layout.outside_first:
            io, outside_aux = self._outside(layers, io, self._cells(side, conveyor.start), key)
        run = self._run if self._gathers_in_iteration else self._run_gathered
        io, aux = run(layers, io, side, key, conveyor)
        if self._layout.num_outside and not self._layout.outside_first:
            io, outside_aux = self._outside(layers, io, self._cells(side, conveyor.end), key)
        targets, weights = (
            self._over_stages(micro[n][conveyor.end]) for n in ("targets", "weights")
        )
        loss, cross_entropy = self._head(outer, io, targets, weights)
        return loss, cross_entropy, aux + outside_aux

    def _run(
        self, layers: Params, io: jax.Array, side: Batch, key: jax.Array | None, conveyor: Conveyor
    ) -> tuple[jax.Array, jax.Array]:
        """All iterations, each gathering its weights: (the conveyor with the outputs, auxiliary loss sum)."""
        chosen = self._over_stages_fn(self._choose_and_apply, (1, 1, 0, 0, 0, None))
        index = jnp.asarray(self._layout.layer_index)

        def iterate(state: State, t: Any) -> tuple[State, None]:
            _, microbatch, repeat = conveyor.units(t)
            x = conveyor.take(state, t)
            y, aux = chosen(
                layers, index, repeat, x, jax.tree.map(lambda a: a[microbatch], side), key
            )
            return conveyor.give(state, y, aux, t), None

        state = conveyor.first_state(io)
        if self._config.scan_iterations:
            state, _ = jax.lax.scan(iterate, state, jnp.arange(conveyor.num_iterations))
        else:
            for t in range(conveyor.num_iterations):
                state, _ = iterate(state, t)
        return conveyor.outputs(state), state.aux

    def _run_gathered(
        self, layers: Params, io: jax.Array, side: Batch, key: jax.Array | None, conveyor: Conveyor
    ) -> tuple[jax.Array, jax.Array]:
        """All iterations on weights that are gathered once per repeat, or once."""
        index = np.asarray(self._layout.layer_index)
        over_stages = self._over_stages_fn(self._apply, (0, 0, 0, 0, None))

        def rest(t: Any, side: Batch, key_data: jax.Array | None) -> Any:
            _, microbatch, repeat = conveyor.units(t)
            key = None if key_data is None else jax.random.wrap_key_data(key_data)
            here = jnp.asarray(index)[repeat, jnp.arange(conveyor.num_stages)]
            return here, jax.tree.map(lambda a: a[microbatch], side), key

        def stages(x: jax.Array, weights: Params, rest: Any) -> tuple[jax.Array, jax.Array]:
            index, side, key = rest
            return over_stages(weights, index, x, side, key)

        gather = RepeatGather(
            stages,
            rest,
            conveyor,
            map_specs(self._gather, self._program.specs["layers"]),
            self._batch_shardings(side),
            self._rules.mesh,
            once=self._config.fsdp_gather == "once",
            scan_iterations=self._config.scan_iterations,
            scan_repeats=self._config.scan_repeats,
        )
        key_data = None if key is None else jax.random.key_data(key)
        return gather.run(layers, io, side, key_data)

    def _gather(self, spec: ParamSpec) -> Gather:
        at_rest = self._rules.spec(spec.axes, spec.shape)
        return Gather(without(at_rest, ("stage",)), spec.dtype, self._program.config.dtype)

    def _batch_shardings(self, side: Batch) -> Sharding:
        def batch_part(axes: Any, shape: Any = None) -> Any:
            return only(self._rules.spec(axes, shape), BATCH_AXES)

        shape = self._layout.shape
        specs = self._program.specs["layers"]
        layers = map_specs(lambda s: batch_part(self.layer_axes + s.axes, shape + s.shape), specs)
        axes = (None, "activation_batch", "activation_length")
        sides = {name: batch_part(axes[: x.ndim]) for name, x in side.items()}
        return Sharding(layers, batch_part((None, *axes)), sides)

    def _choose_and_apply(
        self,
        layers: Params,
        index: jax.Array,
        repeat: jax.Array,
        x: jax.Array,
        side: Batch,
        key: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """One stage: `layers` [V, L, ...], index [V, L]; the rest as in `_apply`."""
        # Chosen inside the rematerialised function, so that no iteration keeps a copy of its
        # weights.
        chunk, index = jax.tree.map(
            lambda p: jax.lax.dynamic_index_in_dim(p, repeat, keepdims=False), (layers, index)
        )
        return self._apply(chunk, index, x, side, key)

    def _apply(
        self, chunk: Params, index: jax.Array, x: jax.Array, side: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """One stage: layers [L, ...], their index [L], activations [B, T, D] -> (activations, auxiliary loss)."""
        return apply_layers(
            self._layer_fn, chunk, index, x, side, key, scan=self._config.scan_layers_per_stage
        )

    def _over_stages_fn(self, stage: Any, in_axes: tuple[int | None, ...]) -> Any:
        """`stage`, rematerialised as configured, for all stages side by side."""
        return jax.vmap(
            self._remat.iteration(stage), in_axes=in_axes, spmd_axis_name=self._stage_axes()
        )

    def _head(
        self, outer: Params, io: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """(loss sum, cross-entropy sum); each stage takes its share of the conveyor, one slot at a time."""
        head_loss = checkpoint(self._program.head_loss, RematPolicy())

        def slot(total: Any, xs: Any) -> tuple[Any, None]:
            x, targets, weights = xs
            return jax.tree.map(
                jnp.add, total, head_loss(outer, self._constrain(x), targets, weights)
            ), None

        slots = tuple(jnp.swapaxes(a, 0, 1) for a in (io, targets, weights))
        return jax.lax.scan(slot, (jnp.zeros(()), jnp.zeros(())), slots)[0]

    def _constrain(self, x_SBTD: jax.Array) -> jax.Array:
        return self._rules.constrain(x_SBTD, ACTIVATION)

    def _cells(self, side: Batch, microbatch: np.ndarray) -> Batch:
        """Side inputs [M, B, ...] as the conveyor has their microbatches, [S, K, B, ...]."""
        return {
            name: self._rules.constrain(a[microbatch], CELLS[: a.ndim + 1])
            for name, a in side.items()
        }

    def _over_stages(self, x: jax.Array) -> jax.Array:
        """Lays [S, K, B, T, ...] out like the conveyor."""
        return self._rules.constrain(x, CELLS[: x.ndim])

    def _stage_axes(self) -> Any:
        return self._rules.spec(("activation_stage",))[0]
