"""Skip steps whose loss or gradient norm lies far above those of recent steps."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from maxpipe.config.sections import OptimizerConfig

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
