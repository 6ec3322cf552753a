"""Balance experts by their load without a loss, and measure how even the load is.

A layer with a selection bias changes it by the load of its experts, not by a gradient (Wang et al.
2024, arXiv:2408.15664). The engines count the load over the global batch; its excess over the mean
takes the place of the bias's gradient. Biases have no moments and no weight decay, and count
neither in the gradient norm nor in clipping.

Letters: N layers with experts, in model order, E experts.
"""

import math

import jax
import jax.numpy as jnp
import optax

from maxpipe.model.parameters import Params, ParamSpec, map_specs

BIAS_AXES = ("expert_bias",)  # logical axes that mark a selection bias

# Names of the figures of `load_figures`.
LOAD_MAX, LOAD_ENTROPY, IDLE_EXPERTS = "expert_load_max", "expert_load_entropy", "idle_experts"
DROPPED = "dropped_assignments"


def is_bias(spec: ParamSpec) -> bool:
    """Return whether a parameter is a selection bias of experts."""
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
    """Return the bias after a step: less by `rate` where the load is high, more where it is low.

    The mean over a layer's experts does not change.

    Args:
      bias, excess: float32 [..., E].
      rate: `model.moe.bias_rate`.
    """
    direction = jnp.sign(excess)
    return bias - rate * (direction - jnp.mean(direction, axis=-1, keepdims=True))


def load_figures(load: jax.Array, drops: jax.Array | None) -> dict[str, jax.Array]:
    """Return how even the load of each layer is.

    Args:
      load: float32 [N, E], assignments of tokens to each expert.
      drops: float32 [N], assignments above the capacity; None if there is no capacity.

    Returns:
      Float32 [N] by name:
        LOAD_MAX: the largest load divided by the mean; 1 if all are equal.
        LOAD_ENTROPY: entropy of the experts' shares divided by its maximum, the logarithm of E.
        IDLE_EXPERTS: number of experts that no token has chosen.
        DROPPED: share of the assignments that are dropped, if there is a capacity.
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
