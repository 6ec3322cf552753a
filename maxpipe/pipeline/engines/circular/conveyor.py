"""The loop state of the circular pipeline: what stands between the stages, and the buffer that feeds and empties them.

In iteration t stage s works on unit n = t - d * s, that is microbatch n % M of repeat n // M
(breadth-first looping, Narayanan et al. 2021); M * V + d * (S - 1) iterations in all, d = 2 with
delayed forwarding.

Letters: S stages, V repeats, M microbatches, K = M / S, B sequences of a microbatch, T sequence, D
embed. `x_SBTD` has one microbatch's activations for every stage.

Inputs, activations that wait for their next repeat, and outputs share one buffer `io_SKBTD` of
exactly M microbatches. It is a conveyor: in iteration t slot t % K moves one stage towards stage 0,
and what stage 0 held goes to the end. A cell is thus read by stage 0 once in M iterations, and
microbatch m always owns the cell whose turn comes at t = m modulo M: an input is read in its turn,
an output written ahead of its next turn.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Constrain = Callable[[jax.Array], jax.Array]


class State(NamedTuple):
    """What an iteration hands to the next.

    Attributes:
      io: the conveyor [S, K, B, T, D].
      shift: what each stage's neighbour sent it [S, B, T, D].
      pending: with delayed forwarding, outputs of the last iteration [S, B, T, D]; else None.
      aux: auxiliary loss so far, float32 scalar.
    """

    io: jax.Array
    shift: jax.Array
    pending: jax.Array | None
    aux: jax.Array


class Conveyor:
    """Index arithmetic, and the parts of an iteration around the stages' work, which are linear in the activations.

    Args:
      S, V, M, d: stages, repeats, microbatches (a multiple of S, at least d * S), forwarding delay.
      constrain: lays [S, B, T, D] out over the mesh.
      bubble_fill: if given, what idle stages produce; tests fill bubbles with NaN to prove that
        nothing reads them.
    """

    def __init__(
        self,
        S: int,
        V: int,
        M: int,
        d: int,
        constrain: Constrain = lambda x: x,
        bubble_fill: float | None = None,
    ):
        assert M % S == 0, (S, M)
        assert d * S <= M, (S, M, d)
        self.num_stages, self.num_repeats, self.num_microbatches, self.delay = S, V, M, d
        self.num_iterations = M * V + d * (S - 1)
        self.fill_iterations = d * (S - 1)
        self._constrain = constrain
        self._bubble_fill = bubble_fill
        self._slots = M // S
        self._first_output = d * (S - 1) + (
            d - 1
        )  # the advance that brings the last stage's first output
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

    def units(self, t: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What each stage does in iteration t: (active bool, microbatch int32, repeat int32), each [S]."""
        unit = t - self.delay * jnp.arange(self.num_stages)
        active = (unit >= 0) & (unit < self.num_microbatches * self.num_repeats)
        repeat = jnp.clip(unit // self.num_microbatches, 0, self.num_repeats - 1)
        return active, unit % self.num_microbatches, repeat

    def first_state(self, io: jax.Array) -> State:
        """The state before iteration 0."""
        nothing = jnp.zeros_like(io[:, 0])
        return State(io, nothing, nothing if self.delay == 2 else None, jnp.zeros(()))

    def take(self, state: State, t: Any) -> jax.Array:
        """What the stages work on in iteration t, [S, B, T, D]."""
        first = (jnp.arange(self.num_stages) == 0)[:, None, None, None]
        x = jnp.where(first, self.read(state.io, t), state.shift)
        # Idle stages work on zeros: whatever a bubble holds, 0 * NaN must not reach a gradient.
        return self._constrain(jnp.where(self._active(t), x, 0))

    def give(self, state: State, y: jax.Array, aux: jax.Array, t: Any) -> State:
        """The state after iteration t, from the stages' outputs [S, B, T, D] and auxiliary losses [S]."""
        if self._bubble_fill is not None:
            y = jnp.where(self._active(t), y, self._bubble_fill)
        y = self._constrain(y)
        leaving = y if state.pending is None else state.pending
        io = self.advance(state.io, leaving, t)
        shift = self._constrain(jnp.roll(leaving, 1, axis=0))
        total = state.aux + jnp.sum(jnp.where(self.units(t)[0], aux, 0))
        return State(io, shift, None if state.pending is None else y, total)

    def outputs(self, state: State) -> jax.Array:
        """The conveyor after the last iteration; `end` says which microbatch is where."""
        return (
            state.io
            if state.pending is None
            else self.advance(state.io, state.pending, self.num_iterations)
        )

    def read(self, io: jax.Array, t: Any) -> jax.Array:
        """Slot of iteration t, [S, B, T, D]; stage 0's entry is its input."""
        return jax.lax.dynamic_index_in_dim(io, t % self._slots, axis=1, keepdims=False)

    def advance(self, io: jax.Array, y: jax.Array, t: Any) -> jax.Array:
        """Moves the slot of iteration t one stage on and stores the last stage's output y[S-1] in its cell."""
        moved = jnp.roll(self.read(io, t), -1, axis=0)
        io = jax.lax.dynamic_update_index_in_dim(io, moved, t % self._slots, axis=1)
        turn = t + self._wait
        target = self._stage_written
        arrived = jnp.roll(y, target + 1 - self.num_stages, axis=0)
        is_target = (
            (jnp.arange(self.num_stages) == target)
            & (t >= self._first_output)
            & (t <= self._last_output)
        )
        cell = jnp.where(is_target[:, None, None, None], arrived, self.read(io, turn))
        return jax.lax.dynamic_update_index_in_dim(io, cell, turn % self._slots, axis=1)

    def _active(self, t: Any) -> jax.Array:
        return self.units(t)[0][:, None, None, None]
