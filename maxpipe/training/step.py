"""One training step, as a pure function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxpipe.training.optimizer import Optimizer, global_norm
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
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
    accept, history = optimizer.spike_filter(state.history, metrics["loss"], norm, finite)
    params, opt_state = optimizer.update(state.params, gradients, state.opt_state, state.step, norm, accept)
    skips = jnp.where(finite, 0, state.skips + 1).astype(jnp.int32)
    metrics |= {"grad_norm": norm, "learning_rate": optimizer.learning_rate(state.step)}
    metrics |= {"finite": finite, "skipped": (~accept).astype(jnp.int32)}
    return TrainState(state.step + 1, state.key, params, opt_state, skips, history), metrics
