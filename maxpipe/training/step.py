"""One training step, as a pure function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxpipe.training.optimizer import Optimizer, global_norm
from maxpipe.training.spikes import History
from maxpipe.training.state import TrainState

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
      (state after the step; scalars: {"loss", "grad_norm", "learning_rate"} float32, {"finite"} bool, {"skipped"}
      int32).
    """
    metrics, gradients = loss_and_gradients(state.params, batch, state.step_key())
    norm = global_norm(gradients)
    loss = metrics["loss"]
    accept, skips, history, judged = judge_step(optimizer, loss, norm, state.step, state.skips, state.history)
    params, opt_state = optimizer.update(state.params, gradients, state.opt_state, state.step, norm, accept)
    return TrainState(state.step + 1, state.key, params, opt_state, skips, history), metrics | judged


def judge_step(
    optimizer: Optimizer, loss: jax.Array, norm: jax.Array, step: jax.Array, skips: jax.Array, history: History | None
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
    return accept, skips, history, metrics | {"finite": finite, "skipped": (~accept).astype(jnp.int32)}
