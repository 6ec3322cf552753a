"""Run one training step, a pure function of state and batch."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxpipe.model.layers import EXPERT_DROPS, EXPERT_LOAD
from maxpipe.model.parameters import Params
from maxpipe.pipeline.engines.base import Batch, Metrics
from maxpipe.training.state import TrainState
from maxpipe.training.update import History, Optimizer, global_norm, load_figures


def train_step(
    loss_and_gradients: Callable[[Params, Batch, jax.Array], tuple[Metrics, Params]],
    place_load: Callable[[Params, jax.Array], Params],
    optimizer: Optimizer,
    state: TrainState,
    batch: Batch,
) -> tuple[TrainState, Metrics]:
    """Compute loss and gradients and apply the update.

    A non-finite step, a spike or a step without targets changes only counters and history.

    Args:
      loss_and_gradients: the method of an `Engine`.
      place_load: function that puts expert load [N, E] in place of selection-bias gradients.

    Returns:
      (state after the step, metrics of the engine and of `judge_step`, with figures of each layer's
      load in place of the load itself).
    """
    # 1. Loss and gradients of the global batch, from the engine in use.
    metrics, gradients = loss_and_gradients(state.params, batch, state.step_key())
    norm = global_norm(gradients)
    # 2. Judge the step on the devices, so that the host need not wait for the loss.
    weight, history = jnp.sum(batch["weights"]), state.history
    verdict = judge_step(optimizer, metrics["loss"], norm, weight, state.step, state.skips, history)
    # 3. Selection biases follow the load. It is not a gradient, so it comes after the norm.
    if (load := metrics.pop(EXPERT_LOAD, None)) is not None:
        gradients = place_load(gradients, load)
        metrics |= load_figures(load, metrics.pop(EXPERT_DROPS, None))
    # 4. Update; a refused step leaves parameters and moments unchanged.
    with jax.named_scope("optimizer"):
        params, opt_state = optimizer.update(
            state.params, gradients, state.opt_state, state.step, norm, verdict.accept
        )
    # The count goes on either way: a refused batch is not tried again.
    after = TrainState(state.step + 1, state.key, params, opt_state, verdict.skips, verdict.history)
    return after, metrics | verdict.metrics


class Verdict(NamedTuple):
    """What `judge_step` decides; `skips` and `history` are those after the step."""

    accept: jax.Array  # bool scalar, whether the update is applied
    skips: jax.Array
    history: History | None
    metrics: Metrics  # scalars


def judge_step(
    optimizer: Optimizer,
    loss: jax.Array,
    norm: jax.Array,
    weight: jax.Array,
    step: jax.Array,
    skips: jax.Array,
    history: History | None,
) -> Verdict:
    """Decide whether a step's update is applied.

    Args:
      weight: sum of the weights of all targets, float32 scalar.
      step, skips, history: fields of the `TrainState` before the step.
    """
    # One NaN in any gradient makes the global norm NaN.
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    # Without targets there is no gradient, but weights would decay and moments fade.
    accept, history = optimizer.spike_filter(history, loss, norm, finite & (weight > 0))
    skips = jnp.where(finite, 0, skips + 1).astype(jnp.int32)
    metrics = {
        "loss": loss,
        "grad_norm": norm,
        "learning_rate": optimizer.learning_rate(step),
        "finite": finite,
        "skipped": (~accept).astype(jnp.int32),
    }
    return Verdict(accept, skips, history, metrics)
