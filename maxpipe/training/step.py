"""TrainState: everything a step changes, and its layout on devices and on disk.

One training step, as a pure function."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from maxpipe.model.parameters import Params
from maxpipe.training.optimizer import Optimizer, global_norm
from maxpipe.training.spikes import History


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Live state of a run.

    Attributes:
      step: int32 scalar, finished steps.
      key: uint32 key data of the run; a step's key is folded from it.
      params: {"embed", "layers", "head"}.
      opt_state: the optimizer's state; subtrees like `params` have the same keys.
      skips: int32 scalar, non-finite steps in a row up to now.
      history: recent steps for the spike filter; None, no leaf at all, without it.
    """

    step: jax.Array
    key: jax.Array
    params: Params
    opt_state: Any
    skips: jax.Array
    history: History | None = None

    def step_key(self) -> jax.Array:
        """PRNG key of the next step."""
        return step_key(self.key, self.step)


def step_key(key: jax.Array, step: jax.Array) -> jax.Array:
    """PRNG key of the step after `step` finished ones, from the key data of the run."""
    return jax.random.fold_in(jax.random.wrap_key_data(key), step)


def new_state(
    params: Params, opt_state: Any, key: jax.Array, history: History | None = None
) -> TrainState:
    """The state before the first step."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, jax.random.key_data(key), params, opt_state, zero, history)


def map_by_parameter(f: Callable[[Any, Any], Any], tree: Any, by_path: Any, otherwise: Any) -> Any:
    """Maps leaves together with what belongs to their parameter.

    Args:
      f: called as f(leaf, value).
      tree: a `TrainState` or part of one.
      by_path: tree like the parameters with a value per parameter.
      otherwise: value for leaves that belong to no parameter, such as counters.

    A leaf belongs to the parameter whose path is part of its own path: optimizer states that mirror
    the parameters match, and trees like the parameters with the state of one in each leaf.
    """
    names = {
        jax.tree_util.keystr(path): value
        for path, value in jax.tree_util.tree_leaves_with_path(by_path)
    }

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        for start, end in itertools.combinations(range(len(path) + 1), 2):
            name = jax.tree_util.keystr(path[start:end])
            if name in names:
                return f(leaf, names[name])
        return f(leaf, otherwise)

    return jax.tree_util.tree_map_with_path(one, tree)


Metrics = dict[str, jax.Array]
LossAndGradients = Callable[[Any, Any, jax.Array], tuple[Metrics, Any]]


def train_step(
    loss_and_gradients: LossAndGradients, optimizer: Optimizer, state: TrainState, batch: Any
) -> tuple[TrainState, Metrics]:
    """Loss, gradients, update. A step that is not finite, or a spike, changes nothing but counters and history.

    Args:
      loss_and_gradients: the pipeline's.
      optimizer: the update rule.
      state: before the step.
      batch: the global batch.

    Returns:
      (state after the step; scalars: {"loss", "grad_norm", "learning_rate"} float32, {"finite"}
      bool, {"skipped"} int32).
    """
    metrics, gradients = loss_and_gradients(state.params, batch, state.step_key())
    norm = global_norm(gradients)
    loss = metrics["loss"]
    accept, skips, history, judged = judge_step(
        optimizer, loss, norm, state.step, state.skips, state.history
    )
    params, opt_state = optimizer.update(
        state.params, gradients, state.opt_state, state.step, norm, accept
    )
    return TrainState(
        state.step + 1, state.key, params, opt_state, skips, history
    ), metrics | judged


def judge_step(
    optimizer: Optimizer,
    loss: jax.Array,
    norm: jax.Array,
    step: jax.Array,
    skips: jax.Array,
    history: History | None,
) -> tuple[jax.Array, jax.Array, History | None, Metrics]:
    """Whether a step's update is made.

    Args:
      optimizer: has the spike filter.
      loss, norm: float32 scalars of the step; the norm is that of all gradients.
      step, skips, history: of the state before the step.

    Returns:
      (bool scalar, skips and history after the step, the step's metrics).
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    accept, history = optimizer.spike_filter(history, loss, norm, finite)
    skips = jnp.where(finite, 0, skips + 1).astype(jnp.int32)
    metrics = {"loss": loss, "grad_norm": norm, "learning_rate": optimizer.learning_rate(step)}
    return (
        accept,
        skips,
        history,
        metrics | {"finite": finite, "skipped": (~accept).astype(jnp.int32)},
    )
