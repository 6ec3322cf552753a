"""Compute learning rates by the schedule that `optimizer.schedule` names.

The facts about them are in `maxpipe.config.catalog.LR_SCHEDULES`. Each maps (progress, config) to a
share of the peak rate: progress is a float32 scalar that runs from 0 at the end of the warm-up to 1
at `optimizer.decay_steps` and stays there.
"""

import jax
import jax.numpy as jnp

from maxpipe.config.sections import OptimizerConfig


def constant(progress: jax.Array, config: OptimizerConfig) -> jax.Array:
    """Keep the peak rate throughout."""
    return jnp.ones_like(progress)


def linear(progress: jax.Array, config: OptimizerConfig) -> jax.Array:
    """Fall in a straight line to the final fraction."""
    return 1 - (1 - config.final_fraction) * progress


def cosine(progress: jax.Array, config: OptimizerConfig) -> jax.Array:
    """Fall along half a cosine to the final fraction (Loshchilov & Hutter 2017)."""
    share = 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return config.final_fraction + (1 - config.final_fraction) * share


def inverse_sqrt(progress: jax.Array, config: OptimizerConfig) -> jax.Array:
    """Fall with the root of the steps (Vaswani et al. 2017), down to the final fraction."""
    warmup = max(config.warmup_steps, 1)
    step = warmup + progress * max(config.decay_steps - config.warmup_steps, 1)
    return jnp.maximum(jnp.sqrt(warmup / step), config.final_fraction)


def wsd(progress: jax.Array, config: OptimizerConfig) -> jax.Array:
    """Keep the peak rate, then fall in a straight line: warm-up, stable, decay (Hu et al. 2024)."""
    decayed = jnp.maximum(progress - config.stable_fraction, 0) / max(
        1 - config.stable_fraction, 1e-6
    )
    return 1 - (1 - config.final_fraction) * decayed
