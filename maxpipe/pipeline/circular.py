"""The circular engine: one shift register, auto-sharded `vmap` over stages, `scan` over iterations; autodiff does the backward.

The design is MaxText's circular pipeline (breadth-first looping, Narayanan et al. 2021): in iteration t stage s
works on unit n = t - d * s, that is microbatch n % M of repeat n // M; M * V + d * (S - 1) iterations in all, d = 2 with
delayed forwarding. With V = 1 it is GPipe.

Letters: S stages, V repeats, L layers per stage, M microbatches, K = M / S, B sequences of a microbatch, T sequence,
D embed. `x_SBTD` has one microbatch's activations for every stage.

Inputs, activations that wait for their next repeat, and outputs share one buffer `io_SKBTD` of exactly M microbatches. It is
a conveyor: in iteration t slot t % K moves one stage towards stage 0, and what stage 0 held goes to the end. A cell is
thus read by stage 0 once in M iterations, and microbatch m always owns the cell whose turn comes at t = m modulo M: an
input is read in its turn, an output written ahead of its next turn.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.model.parameters import Params
from maxpipe.pipeline import microbatches
from maxpipe.pipeline.chunk import apply_layers, layer_function
from maxpipe.pipeline.contract import Batch, Metrics, Parts
from maxpipe.pipeline.remat import Kept
from maxpipe.pipeline.remat._apply import Remat, checkpoint
from maxpipe.pipeline.weights import Weights

ACTIVATION = ("activation_stage", "activation_batch", "activation_length", None)


class CircularPipeline:
    """See `contract.Pipeline`.

    Args:
      parts: program, rules, configuration, layout.
      bubble_fill: if given, what idle stages produce; tests fill bubbles with NaN to prove that nothing reads them.
    """

    layer_axes = ("repeat", "stage", "layers_per_stage")

    def __init__(self, parts: Parts, *, bubble_fill: float | None = None):
        self._program = parts.program
        self._rules = parts.rules
        self._config = parts.config
        self._layout = parts.layout
        self._bubble_fill = bubble_fill
        self.to_canonical = parts.layout.to_canonical
        self.from_canonical = parts.layout.from_canonical
        self.weights = Weights(parts.rules, parts.program.specs, self.layer_axes, parts.layout.shape)
        self._gather_once = parts.config.fsdp_gather == "once"
        self._remat = Remat(parts.config)
        layer_fn = layer_function(parts.program, self._prepare, padded=not parts.layout.is_even)
        self._layer_fn = self._remat.layer(layer_fn)
        self._delay = 2 if parts.config.delay_activation_forwarding else 1

    def _prepare(self, layer: Params) -> Params:
        return layer if self._gather_once else self.weights.gather_layer(self._program.cast(layer))

    def layer_index(self) -> np.ndarray:
        return self._layout.layer_index

    def loss_and_gradients(self, params: Params, batch: Batch, key: jax.Array) -> tuple[Metrics, Params]:
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
        micro = microbatches.split(microbatches.with_sequence_index(batch), M)
        outer = self.weights.gather_outer(self._program.cast({n: params[n] for n in ("embed", "head")}))
        conveyor = Conveyor(S, V, M, self._delay)
        tokens_SKBT = self._over_stages(micro["tokens"][conveyor.start])
        io = self._over_stages(self._program.embed(outer, tokens_SKBT))
        io, aux = self._run(self._layers(params), io, microbatches.side_inputs(micro), key, conveyor)
        targets, weights = (self._over_stages(micro[n][conveyor.end]) for n in ("targets", "weights"))
        loss, cross_entropy = self._head(outer, io, targets, weights)
        return loss, cross_entropy, aux

    def _layers(self, params: Params) -> Params:
        if not self._gather_once:
            return params["layers"]
        return self.weights.gather_stacked(self._program.cast(params["layers"]))

    def _run(
        self, layers: Params, io: jax.Array, side: Batch, key: jax.Array | None, conveyor: "Conveyor"
    ) -> tuple[jax.Array, jax.Array]:
        """All iterations: (the conveyor with the outputs, auxiliary loss sum)."""
        iterate = partial(self._iteration, layers, side, key, conveyor)
        nothing = jnp.zeros_like(io[:, 0])
        pending = nothing if self._delay == 2 else None
        carry = (io, nothing, pending, jnp.zeros(()))
        (io, _, pending, aux), _ = jax.lax.scan(iterate, carry, jnp.arange(conveyor.num_iterations))
        if self._delay == 2:
            io = conveyor.advance(io, pending, conveyor.num_iterations)
        return io, aux

    def _iteration(
        self, layers: Params, side: Batch, key: jax.Array | None, conveyor: "Conveyor", carry: Any, t: jax.Array
    ) -> tuple[Any, None]:
        """One iteration: every stage takes its input, computes, and passes the result on."""
        io, shift, pending, total = carry
        S, V, M = self._layout.num_stages, self._layout.num_repeats, conveyor.num_microbatches
        unit = t - self._delay * jnp.arange(S)
        active = (unit >= 0) & (unit < M * V)
        microbatch, repeat = unit % M, jnp.clip(unit // M, 0, V - 1)
        first = (jnp.arange(S) == 0)[:, None, None, None]
        x = jnp.where(first, conveyor.read(io, t), shift)
        # Idle stages work on zeros: whatever a bubble holds, 0 * NaN must not reach a gradient.
        x = jnp.where(active[:, None, None, None], x, 0)
        y, aux = self._stages(layers, repeat, self._constrain(x), jax.tree.map(lambda a: a[microbatch], side), key)
        if self._bubble_fill is not None:
            y = jnp.where(active[:, None, None, None], y, self._bubble_fill)
        y = self._constrain(y)
        leaving = y if pending is None else pending
        io = conveyor.advance(io, leaving, t)
        shift = self._constrain(jnp.roll(leaving, 1, axis=0))
        return (io, shift, None if pending is None else y, total + jnp.sum(jnp.where(active, aux, 0))), None

    def _stages(
        self, layers: Params, repeat: jax.Array, x: jax.Array, side: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """All stages side by side: (activations [S,B,T,D], auxiliary losses [S])."""

        def stage(layers: Params, index: jax.Array, repeat: jax.Array, x: jax.Array, side: Batch) -> Any:
            # Chosen inside the rematerialised function, so that no iteration keeps a copy of its weights.
            chunk, index = jax.tree.map(lambda p: jax.lax.dynamic_index_in_dim(p, repeat, keepdims=False), (layers, index))
            return apply_layers(self._layer_fn, chunk, index, x, side, key, scan=self._config.scan_layers_per_stage)

        over_stages = jax.vmap(self._remat.iteration(stage), in_axes=(1, 1, 0, 0, 0), spmd_axis_name=self._stage_axes())
        return over_stages(layers, jnp.asarray(self._layout.layer_index), repeat, x, side)

    def _head(
        self, outer: Params, io: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """(loss sum, cross-entropy sum); each stage takes its share of the conveyor, one slot at a time."""
        head_loss = checkpoint(self._program.head_loss, Kept())

        def slot(total: Any, xs: Any) -> tuple[Any, None]:
            x, targets, weights = xs
            return jax.tree.map(jnp.add, total, head_loss(outer, self._constrain(x), targets, weights)), None

        slots = tuple(jnp.swapaxes(a, 0, 1) for a in (io, targets, weights))
        return jax.lax.scan(slot, (jnp.zeros(()), jnp.zeros(())), slots)[0]

    def _constrain(self, x_SBTD: jax.Array) -> jax.Array:
        return self._rules.constrain(x_SBTD, ACTIVATION)

    def _over_stages(self, x: jax.Array) -> jax.Array:
        """Lays [S, K, B, T, ...] out like the conveyor."""
        axes = ("activation_stage", None, "activation_batch", "activation_length") + (None,) * (x.ndim - 4)
        return self._rules.constrain(x, axes)

    def _stage_axes(self) -> Any:
        return self._rules.spec(("activation_stage",))[0]


class Conveyor:
    """Index arithmetic of the buffer described at the top of this module.

    Args:
      S, V, M, d: stages, repeats, microbatches (a multiple of S, at least d * S), forwarding delay.
    """

    def __init__(self, S: int, V: int, M: int, d: int):
        assert M % S == 0 and M >= d * S, (S, M, d)
        self.num_stages, self.num_microbatches = S, M
        self.num_iterations = M * V + d * (S - 1)
        self._slots = M // S
        self._first_output = d * (S - 1) + (d - 1)  # the advance that brings the last stage's first output
        self._last_output = self._first_output + M * V - 1
        # An output written in iteration t has its next turn in iteration t + wait.
        self._wait = M - self._first_output
        self._stage_written = (self._wait - 1) // self._slots

    @property
    def start(self) -> np.ndarray:
        """[S, K]: the microbatch in each cell before iteration 0."""
        return np.arange(self.num_microbatches).reshape(self.num_stages, self._slots)

    @property
    def end(self) -> np.ndarray:
        """[S, K]: the microbatch in each cell after the last advance."""
        t = max(self.num_iterations, self._last_output + 1)
        slot = np.arange(self._slots)
        turn = t + (slot - t) % self._slots + np.arange(self.num_stages)[:, None] * self._slots
        return turn % self.num_microbatches

    def read(self, io: jax.Array, t: jax.Array) -> jax.Array:
        """Slot of iteration t, [S, B, T, D]; stage 0's entry is its input."""
        return jax.lax.dynamic_index_in_dim(io, t % self._slots, axis=1, keepdims=False)

    def advance(self, io: jax.Array, y: jax.Array | None, t: Any) -> jax.Array:
        """Moves the slot of iteration t one stage on and stores the last stage's output y[S-1] in its cell."""
        io = jax.lax.dynamic_update_index_in_dim(io, jnp.roll(self.read(io, t), -1, axis=0), t % self._slots, axis=1)
        turn = t + self._wait
        target = self._stage_written
        arrived = jnp.roll(y, target + 1 - self.num_stages, axis=0)
        is_target = (jnp.arange(self.num_stages) == target) & (t >= self._first_output) & (t <= self._last_output)
        cell = jnp.where(is_target[:, None, None, None], arrived, self.read(io, turn))
        return jax.lax.dynamic_update_index_in_dim(io, cell, turn % self._slots, axis=1)
