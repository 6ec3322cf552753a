"""Hold the loop state of the circular pipeline: activations between the stages, and the conveyor.

In iteration t stage s works on unit n = t - d s, which is microbatch n % M in repeat n // M
(looped breadth-first, Lamy-Poirier 2022, arXiv:2211.05953). There are M V + d (S-1) iterations; d
is 2 with delayed forwarding and 1 without.

Inputs, activations between two repeats, and outputs share one buffer of exactly M microbatches, the
conveyor, [S, K, B, T, D] with K = M / S slots per stage. Iteration t turns slot t % K: every cell
of the slot moves one stage down, from stage s to s - 1, and from stage 0 to S - 1. So a cell
reaches stage 0 once in S K = M iterations, and microbatch m owns the cell that stage 0 reads in the
iterations t = m modulo M. An input is read from that cell in its turn; an output is stored there
before the cell's next turn.

Example: S=2, V=2, M=4, d=1, so K=2, in 9 iterations. `m.c` is microbatch m after c of its S V = 4
chunks. Shown are what the stages work on, and the conveyor before the iteration: for each slot the
cells of stages 0 and 1, in [brackets] where the slot turns.

    t  stage 0  stage 1    slot 0     slot 1
    0    0.0       -     [0.0  2.0]  1.0  3.0
    1    1.0      0.1     2.0  0.0  [1.0  3.0]
    2    2.0      1.1    [2.0  0.2]  3.0  1.0
    3    3.0      2.1     0.2  2.0  [3.0  1.2]
    4    0.2      3.1    [0.2  2.2]  1.2  3.0
    5    1.2      0.3     2.2  0.2  [1.2  3.2]
    6    2.2      1.3    [2.2  0.4]  3.2  1.2
    7    3.2      2.3     0.4  2.2  [3.2  1.4]
    8     -       3.3    [0.4  2.4]  1.4  3.2
    9     -        -      2.4  0.4  [1.4  3.4]
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.model.layers import AuxiliaryLosses
from maxpipe.pipeline.chunk import sum_where

Constrain = Callable[[jax.Array], jax.Array]
Iteration: TypeAlias = jax.Array | int  # t; an array inside a loop


class State(NamedTuple):
    """What an iteration hands to the next.

    Attributes:
      io: the conveyor, [S, K, B, T, D].
      shift: what each stage has received from the previous one, [S, B, T, D].
      pending: with delayed forwarding the outputs of the last iteration, [S, B, T, D]; else None.
      aux: auxiliary losses so far.
    """

    io: jax.Array
    shift: jax.Array
    pending: jax.Array | None
    aux: AuxiliaryLosses


@dataclass(frozen=True)
class Conveyor:
    """Index arithmetic, and all of an iteration but the stages' work. Linear in the activations.

    Attributes:
      num_stages, num_repeats, num_microbatches: S, V, M; M is a multiple of S and at least d S.
      delay: d, iterations from a stage's start on a unit to the next stage's.
      constrain: lays [S, B, T, D] out over the mesh.
      bubble_fill: replaces the output of idle stages; tests pass NaN to prove that nothing
        reads it.
    """

    num_stages: int
    num_repeats: int
    num_microbatches: int
    delay: int
    constrain: Constrain = lambda x: x
    bubble_fill: float | None = None

    def __post_init__(self) -> None:
        assert self.num_microbatches % self.num_stages == 0, self
        assert self.delay * self.num_stages <= self.num_microbatches, self

    @property
    def num_slots(self) -> int:
        return self.num_microbatches // self.num_stages

    @property
    def num_units(self) -> int:
        return self.num_microbatches * self.num_repeats

    @property
    def fill_iterations(self) -> int:
        return self.delay * (self.num_stages - 1)

    @property
    def num_iterations(self) -> int:
        """Return M V + d (S-1): the last stage's units, and the iterations before its first."""
        return self.num_units + self.fill_iterations

    @property
    def start(self) -> np.ndarray:
        """Return the microbatch in each cell before iteration 0, int [S, K]."""
        # The cell of stage s in slot k is read in iteration s K + k.
        return np.arange(self.num_microbatches).reshape(self.num_stages, self.num_slots)

    @property
    def end(self) -> np.ndarray:
        """Return the microbatch in each cell after the last call of `advance`, int [S, K]."""
        t = self._first_output + self.num_units  # the iteration that would come next
        slots = np.arange(self.num_slots)  # [K]
        stages = np.arange(self.num_stages)[:, None]  # [S, 1]
        # Slot k turns next in iteration t + (k - t) % K, when stage 0 reads its own cell; the cell
        # of stage s is read s more turns of the slot later, and one turn takes K iterations.
        next_read = t + (slots - t) % self.num_slots + stages * self.num_slots
        return next_read % self.num_microbatches

    def units(self, t: Iteration) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return each stage's unit of iteration t, [S] each: (is active, microbatch, repeat)."""
        unit = t - self.delay * jnp.arange(self.num_stages)
        is_active = (unit >= 0) & (unit < self.num_units)
        repeat = jnp.clip(unit // self.num_microbatches, 0, self.num_repeats - 1)
        return is_active, unit % self.num_microbatches, repeat

    def first_state(self, io: jax.Array, aux: AuxiliaryLosses) -> State:
        """Return the state before iteration 0, with inputs as `start` says, and zeros in `aux`."""
        zeros = jnp.zeros_like(io[:, 0])  # [S, B, T, D]
        return State(io, zeros, zeros if self.delay == 2 else None, aux)

    def stage_inputs(self, state: State, t: Iteration) -> jax.Array:
        # 1. Stage 0 reads the conveyor, every other stage what the previous one has sent.
        is_first = (jnp.arange(self.num_stages) == 0)[:, None, None, None]  # [S, 1, 1, 1]
        x = jnp.where(is_first, self.read(state.io, t), state.shift)
        # 2. Idle stages work on zeros: whatever a bubble holds, 0 * NaN must not reach a gradient.
        return self.constrain(jnp.where(self._is_active(t), x, 0))

    def next_state(self, state: State, y: jax.Array, aux: AuxiliaryLosses, t: Iteration) -> State:
        """Return the state after iteration t with outputs y [S, B, T, D], losses [S, ...] each."""
        if self.bubble_fill is not None:
            y = jnp.where(self._is_active(t), y, self.bubble_fill)
        y = self.constrain(y)
        # 1. Delayed forwarding sends what was computed an iteration ago, so that the transfer
        # overlaps with this iteration's computation.
        leaving = y if state.pending is None else state.pending
        # 2. The last stage's output returns to the conveyor, all others go to the next stage.
        shift = self.send(leaving)
        io = self.advance(state.io, leaving, shift, t)
        # 3. Idle stages have no loss.
        is_active = self.units(t)[0]
        total = jax.tree.map(jnp.add, state.aux, sum_where(is_active, aux))
        return State(io, shift, None if state.pending is None else y, total)

    def outputs(self, state: State) -> jax.Array:
        """Return the conveyor after the last iteration; `end` says which microbatch is where."""
        if state.pending is None:
            return state.io
        return self.advance(state.io, state.pending, self.send(state.pending), self.num_iterations)

    def read(self, io: jax.Array, t: Iteration) -> jax.Array:
        """Return the slot of iteration t, [S, B, T, D]; stage 0's entry is its input."""
        return jax.lax.dynamic_index_in_dim(io, t % self.num_slots, axis=1, keepdims=False)

    def send(self, y: jax.Array) -> jax.Array:
        """Return what each stage receives from the previous one, and stage 0 from the last."""
        return self.constrain(jnp.roll(y, 1, axis=0))

    def advance(self, io: jax.Array, y: jax.Array, shift: jax.Array, t: Iteration) -> jax.Array:
        """Turn the slot of iteration t and store the last stage's output in its microbatch's cell.

        What leaves the stages is y [S, B, T, D]; shift is what `send` returns for it.
        """
        # 1. Turn the slot: every cell moves one stage down.
        turned = jnp.roll(self.read(io, t), -1, axis=0)  # [S, B, T, D]
        io = jax.lax.dynamic_update_index_in_dim(io, turned, t % self.num_slots, axis=1)
        # 2. Find the cell of the output: the one that stage 0 reads in iteration next_read. It is
        # in slot next_read % K. Cells at stage 0 are read 1 ... K iterations from now, cells at
        # stage 1 K + 1 ... 2K iterations from now, and so on: the wait says the stage.
        next_read = t + self._output_wait
        target = (self._output_wait - 1) // self.num_slots
        # 3. Bring y[S-1] to that stage and store it there, while the last stage has outputs.
        distance = target + 1 - self.num_stages
        arrived = shift if target == 0 else jnp.roll(y, distance, axis=0)  # [S, B, T, D]
        last_output = self._first_output + self.num_units - 1
        is_target = (  # [S]
            (jnp.arange(self.num_stages) == target) & (t >= self._first_output) & (t <= last_output)
        )
        cells = jnp.where(is_target[:, None, None, None], arrived, self.read(io, next_read))
        return jax.lax.dynamic_update_index_in_dim(io, cells, next_read % self.num_slots, axis=1)

    @property
    def _first_output(self) -> int:
        """Return the iteration whose `advance` stores the last stage's first output."""
        return self.fill_iterations + (self.delay - 1)

    @property
    def _output_wait(self) -> int:
        """Return the iterations from storing an output to reading it; at least 1, as d S <= M."""
        # Unit n is stored in iteration n + first_output; stage 0 reads that cell for unit n + M.
        return self.num_microbatches - self._first_output

    def _is_active(self, t: Iteration) -> jax.Array:
        """Return whether each stage works in iteration t, bool [S, 1, 1, 1]."""
        return self.units(t)[0][:, None, None, None]
