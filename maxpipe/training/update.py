"""Update parameters: spike filter, clipping, the optimizer's direction, decay, learning rate."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from maxpipe.config.catalog import LR_SCHEDULES, OPTIMIZERS
from maxpipe.config.imports import implementation
from maxpipe.config.sections import OptimizerConfig
from maxpipe.model.layers import RANK_AXIS
from maxpipe.model.parameters import (
    Params,
    ParamSpec,
    map_specs,
    trainable,
    with_trainable,
)
from maxpipe.training.expert_load import balanced, is_bias, moved_by_gradients

# Matrices at the residual stream or a latent, and adapters, decay; norms and biases do not.
DECAYING_AXES = {"embed", "outer_embed", "expert_embed", "latent", "router", RANK_AXIS}
# On a plateau hardly any deviation is left, and a ripple would count as a spike.
LEAST_DEVIATION = 0.01


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class History:
    """Recent steps.

    Attributes:
      values: float32 [2, window], losses and gradient norms, a ring buffer.
      count: int32 scalar, steps entered so far.
    """

    values: jax.Array
    count: jax.Array


class SpikeFilter:
    """Tells spikes from ordinary steps.

    The rule is that of OLMo-core's SkipStepOptimizer: a step is a spike if its loss or its gradient
    norm exceeds the mean of the window by more than `optimizer.spike_deviations` standard
    deviations. Spikes enter the window like other steps, so that a run whose level has changed for
    good goes on after a while. Non-finite values do not enter: one of them would make the filter
    skip all steps until it leaves.

    Args:
      config: `optimizer.*`; without `spike_window` there is no history and nothing is computed.
    """

    def __init__(self, config: OptimizerConfig):
        self._window = config.spike_window
        self._deviations = config.spike_deviations

    def init(self) -> History | None:
        """Return the history before the first step."""
        if not self._window:
            return None
        return History(jnp.zeros((2, self._window)), jnp.zeros((), jnp.int32))

    def __call__(
        self, history: History | None, loss: jax.Array, norm: jax.Array, finite: jax.Array
    ) -> tuple[jax.Array, History | None]:
        """Judge one step.

        Args:
          history: the steps before this one.
          loss, norm: float32 scalars of the step.
          finite: bool scalar, whether both are finite.

        Returns:
          (bool scalar: finite and no spike; the history with the step).
        """
        if history is None:
            return finite, None
        step = jnp.stack([loss, norm])
        mean = history.values.mean(axis=1)
        deviation = jnp.maximum(history.values.std(axis=1), LEAST_DEVIATION * jnp.abs(mean))
        is_spike = jnp.any(step > mean + self._deviations * deviation) & (
            history.count >= self._window
        )
        entered = history.values.at[:, history.count % self._window].set(step)
        values = jnp.where(finite, entered, history.values)
        return finite & ~is_spike, History(values, history.count + finite)


class Optimizer:
    """Update one parameter tree, as a pure function of it, its gradients and its state.

    Args:
      config: the resolved `optimizer.*`.
      specs: tree of `ParamSpec`s, of one layer for the layers. They say which parameters are
        frozen; their logical axes say which decay, and which are selection biases of experts.
      bias_rate: `model.moe.bias_rate`.

    Attributes:
      spike_filter: the filter that decides which steps are spikes.
    """

    def __init__(self, config: OptimizerConfig, specs: Params, bias_rate: float = 0.0):
        self._config = config
        self._specs = specs
        self._bias_rate = bias_rate
        self.spike_filter = SpikeFilter(config)
        optimizer = implementation(OPTIMIZERS[config.name])
        self._transform = optimizer(config, moved_by_gradients(specs, specs))
        self._decays = map_specs(lambda spec: bool(DECAYING_AXES & set(spec.axes)), specs)

    def init(self, params: Params) -> optax.OptState:
        """Return the optimizer's state before the first step; statistics are float32."""
        params = moved_by_gradients(self._specs, params)
        return self._transform.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))

    def learning_rate(self, step: jax.Array) -> jax.Array:
        """Return the rate of the update after `step` finished steps, float32 scalar."""
        return learning_rate(self._config, step)

    def update(
        self,
        params: Params,
        gradients: Params,
        state: optax.OptState,
        step: jax.Array,
        norm: jax.Array,
        accept: jax.Array,
    ) -> tuple[Params, optax.OptState]:
        """Apply one update.

        Args:
          params, gradients, state: matching trees, which may be part of a model. Gradients of
            selection biases are what `expert_load.with_excess` puts there; frozen parameters
            have none, see `parameters.trainable`.
          step: int32 scalar, finished steps.
          norm: float32 scalar, norm of all gradients of the model.
          accept: bool scalar; False leaves parameters and state as they are, bit for bit.

        Returns:
          (parameters, state).
        """
        # A conditional, because selecting leaf by leaf would keep old values next to new ones: on
        # CPUs that doubles the update's time. Frozen parameters bypass it.
        moving, state = jax.lax.cond(
            accept,
            self._accepted,
            lambda params, state, *_: (params, state),
            trainable(self._specs, params),
            state,
            gradients,
            step,
            norm,
        )
        return with_trainable(params, moving), state

    def _accepted(
        self,
        params: Params,
        state: optax.OptState,
        gradients: Params,
        step: jax.Array,
        norm: jax.Array,
    ) -> tuple[Params, optax.OptState]:
        config = self._config
        clip: jax.Array | float = 1.0
        if config.grad_clip_norm:
            clip = jnp.minimum(1.0, config.grad_clip_norm / (norm + 1e-6))
        clipped, others = (moved_by_gradients(self._specs, tree) for tree in (gradients, params))
        clipped = jax.tree.map(lambda g: g.astype(jnp.float32) * clip, clipped)
        directions, state = self._transform.update(clipped, state, others)
        rate = self.learning_rate(step)

        def apply(
            spec: ParamSpec, p: jax.Array, g: jax.Array, direction: jax.Array, decays: bool
        ) -> jax.Array:
            if spec.frozen:
                return p  # None: see `update`
            if is_bias(spec):
                return balanced(p, g, self._bias_rate)
            if not config.learning_rate:
                return p  # p - 0 would turn -0.0 into 0.0
            p32 = p.astype(jnp.float32)
            decay = config.weight_decay if decays else 0.0
            return (p32 - rate * (direction + decay * p32)).astype(p.dtype)

        trees = params, gradients, directions, self._decays
        return map_specs(apply, self._specs, *trees), state


def learning_rate(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """Return the rate of the update after `step` finished steps, float32 scalar.

    Warm-up is linear and reaches the peak in update `warmup_steps`; the schedule then runs to
    `decay_steps`.

    Args:
      config: the resolved `optimizer.*`.
      step: int32 scalar.
    """
    finished = step.astype(jnp.float32)
    warmup = jnp.minimum(1.0, (finished + 1) / max(config.warmup_steps, 1))
    decay_steps = max(config.decay_steps - config.warmup_steps, 1)
    progress = (finished - config.warmup_steps) / decay_steps
    share = implementation(LR_SCHEDULES[config.schedule])(jnp.clip(progress, 0.0, 1.0), config)
    return config.learning_rate * warmup * share


def global_norm(tree: Params) -> jax.Array:
    """Return the root of the sum of squares of all leaves, float32 scalar."""
    return optax.global_norm(jax.tree.map(lambda g: g.astype(jnp.float32), tree))
