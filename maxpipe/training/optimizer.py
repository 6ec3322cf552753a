"""The update of parameters: clipping, the optimizer's direction, decay, learning rate, and skipping bad steps."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxpipe.config.catalog import LR_SCHEDULES, OPTIMIZERS
from maxpipe.config.imports import implementation
from maxpipe.config.sections import OptimizerConfig
from maxpipe.model.parameters import Params, map_specs
from maxpipe.training.spikes import SpikeFilter

# Matrices that touch the residual stream decay; norms and biases do not.
DECAYING_AXES = {"embed", "outer_embed"}


class Optimizer:
    """A pure function of one parameter tree, its gradients and its state.

    Args:
      config: `optimizer.*`, resolved.
      specs: tree of `ParamSpec`s: what one layer's parameters are, and by logical axes which decay.
    """

    def __init__(self, config: OptimizerConfig, specs: Any):
        self._config = config
        self.spike_filter = SpikeFilter(config)
        self._transform = implementation(OPTIMIZERS[config.name])(config, specs)
        self._rate = implementation(LR_SCHEDULES[config.schedule])
        self._decays = map_specs(lambda spec: bool(DECAYING_AXES & set(spec.axes)), specs)

    def init(self, params: Params) -> Any:
        """State of the optimizer before the first step; statistics are float32 whatever the parameters are."""
        return self._transform.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))

    def learning_rate(self, step: jax.Array) -> jax.Array:
        """Rate of the update that follows `step` finished steps, float32 scalar.

        Warm-up is linear and reaches the peak in update `warmup_steps`; the schedule then runs to
        `decay_steps`.
        """
        config, done = self._config, step.astype(jnp.float32)
        warmup = jnp.minimum(1.0, (done + 1) / max(config.warmup_steps, 1))
        progress = (done - config.warmup_steps) / max(config.decay_steps - config.warmup_steps, 1)
        share = self._rate(jnp.clip(progress, 0.0, 1.0), config)
        return config.learning_rate * warmup * share

    def update(
        self,
        params: Params,
        gradients: Params,
        state: Any,
        step: jax.Array,
        norm: jax.Array,
        accept: jax.Array,
    ) -> tuple[Params, Any]:
        """One step.

        Args:
          params, gradients, state: of the same tree; part of a model is enough.
          step: int32 scalar, finished steps.
          norm: float32 scalar, norm of the gradients of the whole model.
          accept: bool scalar; False leaves parameters and state as they are, bit for bit.

        Returns:
          (parameters, state).
        """
        # Choosing between results, leaf by leaf, keeps old values beside new ones: on CPUs twice
        # the update's time.
        return jax.lax.cond(
            accept,
            self._accepted,
            lambda params, state, *_: (params, state),
            params,
            state,
            gradients,
            step,
            norm,
        )

    def _accepted(
        self, params: Params, state: Any, gradients: Params, step: jax.Array, norm: jax.Array
    ) -> tuple[Params, Any]:
        config = self._config
        clip = (
            jnp.minimum(1.0, config.grad_clip_norm / (norm + 1e-6))
            if config.grad_clip_norm
            else 1.0
        )
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32) * clip, gradients)
        directions, state = self._transform.update(gradients, state, params)
        rate = self.learning_rate(step)

        def apply(p: jax.Array, direction: jax.Array, decays: bool) -> jax.Array:
            p32 = p.astype(jnp.float32)
            decay = config.weight_decay if decays else 0.0
            return (p32 - rate * (direction + decay * p32)).astype(p.dtype)

        return jax.tree.map(apply, params, directions, self._decays), state


def global_norm(tree: Params) -> jax.Array:
    """Root of the sum of squares of all leaves, float32 scalar."""
    return optax.global_norm(jax.tree.map(lambda g: g.astype(jnp.float32), tree))
