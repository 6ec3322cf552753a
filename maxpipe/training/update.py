"""Update parameters: spike filter, clipping, the optimizer's direction, decay, learning rate.

A layer with a selection bias changes it by the load of its experts, not by a gradient (Wang et al.
2024, arXiv:2408.15664). The engines count the load over the global batch; its excess over the mean
takes the place of the bias's gradient. Biases have no moments and no weight decay, and count
neither in the gradient norm nor in clipping.

Letters: N layers with experts, in model order, E experts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxpipe.config.catalog import LR_SCHEDULES, OPTIMIZERS
from maxpipe.config.imports import implementation
from maxpipe.config.sections import OptimizerConfig
from maxpipe.model.layers import RANK_AXIS
from maxpipe.model.parameters import Params, ParamSpec, map_specs, trainable, with_trainable
from maxpipe.training import moments

# Matrices at the residual stream or a latent, and adapters, decay; norms and biases do not.
DECAYING_AXES = {"embed", "outer_embed", "expert_embed", "latent", "router", RANK_AXIS}
# On a plateau hardly any deviation is left, and a ripple would count as a spike.
LEAST_DEVIATION = 0.01
BIAS_AXES = ("expert_bias",)  # logical axes that mark a selection bias

# Names of the figures of `load_figures`.
LOAD_MAX, LOAD_ENTROPY, IDLE_EXPERTS = "expert_load_max", "expert_load_entropy", "idle_experts"
DROPPED = "dropped_assignments"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class History:
    """Losses and gradient norms of recent steps."""

    values: jax.Array  # float32 [2, window], a ring buffer
    count: jax.Array  # int32 scalar, steps entered so far


class SpikeFilter:
    """Tells spikes from ordinary steps.

    The rule is that of OLMo-core's SkipStepOptimizer: a step is a spike if its loss or its gradient
    norm exceeds the mean of the window by more than `optimizer.spike_deviations` standard
    deviations. Spikes enter the window like other steps, so that a run whose level has changed for
    good goes on after a while. Non-finite values do not enter: one of them would make the filter
    skip all steps until it leaves. Without `spike_window` there is no history.
    """

    def __init__(self, config: OptimizerConfig):
        self._window = config.spike_window
        self._deviations = config.spike_deviations

    def init(self) -> History | None:
        if not self._window:
            return None
        return History(jnp.zeros((2, self._window)), jnp.zeros((), jnp.int32))

    def __call__(
        self, history: History | None, loss: jax.Array, norm: jax.Array, finite: jax.Array
    ) -> tuple[jax.Array, History | None]:
        """Return whether a step is finite and no spike, and the history with the step."""
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
      specs: tree of `ParamSpec`s, of one layer for the layers. They say which parameters are
        frozen; their logical axes say which decay, and which are selection biases of experts.
      bias_rate: `model.moe.bias_rate`.
      shardings: how the live parameters are laid out; None on one device.
      layer_index: `layer_index()` of the engine, for moments in bfloat16.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        specs: Params,
        bias_rate: float = 0.0,
        shardings: Params | None = None,
        layer_index: np.ndarray | Sequence[np.ndarray] = (),
    ):
        self._config = config
        self._specs = specs
        self._bias_rate = bias_rate
        self.spike_filter = SpikeFilter(config)
        optimizer = implementation(OPTIMIZERS[config.name])
        self._transform = optax.with_extra_args_support(
            optimizer(config, moved_by_gradients(specs, specs))
        )
        is_narrow = config.moment_dtype == "bfloat16"
        self._sources = moments.sources(specs, layer_index) if is_narrow else None
        self._shardings = shardings and moved_by_gradients(specs, shardings)
        self._decays = map_specs(lambda spec: bool(DECAYING_AXES & set(spec.axes)), specs)

    def init(self, params: Params) -> optax.OptState:
        """Return the optimizer's state before the first step.

        Statistics are float32, moments have `optimizer.moment_dtype`.
        """
        params = moved_by_gradients(self._specs, params)
        state = self._transform.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))
        return moments.cast(state, jnp.float32, jnp.dtype(self._config.moment_dtype))

    def learning_rate(self, step: jax.Array) -> jax.Array:
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
        """Apply one update; return (parameters, state).

        Args:
          params, gradients, state: matching trees, which may be part of a model. Gradients of
            selection biases are what `with_excess` puts there; frozen parameters have none, see
            `parameters.trainable`.
          norm: float32 scalar, norm of all gradients of the model.
          accept: bool scalar; False leaves parameters and state as they are, bit for bit.
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
        wide = moments.cast(state, jnp.dtype(config.moment_dtype), jnp.float32)
        directions, after = self._transform.update(clipped, wide, others, shardings=self._shardings)
        if self._sources is not None:
            after = moments.rounded(after, state, self._sources, step)
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
        return map_specs(apply, self._specs, *trees), after


def learning_rate(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """Return the rate of the update after `step` finished steps, float32 scalar.

    Warm-up is linear and reaches the peak in update `warmup_steps`; the schedule then runs to
    `decay_steps`.
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


def is_bias(spec: ParamSpec) -> bool:
    return spec.axes == BIAS_AXES


def moved_by_gradients(specs: Params, tree: Params) -> Params:
    """Return a tree like the specs, masked at selection biases and frozen parameters."""

    def masked(spec: ParamSpec, node: object) -> object:
        return optax.MaskedNode() if is_bias(spec) or spec.frozen else node

    return map_specs(masked, specs, tree)


def with_excess(specs: Params, gradients: Params, load: jax.Array) -> Params:
    """Put the load's excess over the mean in place of the gradients of selection biases.

    Args:
      specs: specs of one layer.
      gradients: gradients of layers, leaves [..., *spec.shape].
      load: float32 [..., E], assignments of tokens to each expert of these layers.
    """
    excess = load - jnp.mean(load, axis=-1, keepdims=True)
    return map_specs(lambda spec, g: excess if is_bias(spec) else g, specs, gradients)


def balanced(bias: jax.Array, excess: jax.Array, rate: float) -> jax.Array:
    """Return the bias [..., E] after a step: less where the load is high, more where it is low.

    The mean over a layer's experts does not change.
    """
    direction = jnp.sign(excess)
    return bias - rate * (direction - jnp.mean(direction, axis=-1, keepdims=True))


def load_figures(load: jax.Array, drops: jax.Array | None) -> dict[str, jax.Array]:
    """Return how even the load [N, E] of each layer is, float32 [N] by name.

    LOAD_MAX is the largest load over the mean, LOAD_ENTROPY the entropy of the experts' shares over
    its maximum, IDLE_EXPERTS the number of experts without a token, DROPPED a share of assignments.
    `drops` [N] are assignments above the capacity; None if there is none.
    """
    num_experts = load.shape[-1]
    total = jnp.sum(load, axis=-1, keepdims=True)
    share = load / total
    entropy = -jnp.sum(share * jnp.log(jnp.where(share > 0, share, 1)), axis=-1)
    idle = jnp.sum(load == 0, axis=-1, dtype=jnp.float32)
    dropped = {} if drops is None else {DROPPED: drops / total[..., 0]}
    return dropped | {
        LOAD_MAX: num_experts * jnp.max(share, axis=-1),
        LOAD_ENTROPY: entropy / max(math.log(num_experts), 1e-6),
        IDLE_EXPERTS: idle,
    }
