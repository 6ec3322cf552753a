"""Applying a policy to functions: whole iterations, single layers, or both."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from maxpipe.config.sections import PipelineConfig
from maxpipe.pipeline.remat import MATMULS, REMAT, Kept

Function = Callable[..., Any]

LAYER_INPUT = "layer_input"

# Everything that happens to a weight between its place at rest and a matrix product. For activations these cost next to
# nothing, so computing them again is no loss there.
_COPIES = frozenset(
    {
        "gather", "dynamic_slice", "slice", "squeeze", "reshape", "broadcast_in_dim", "transpose",
        "convert_element_type", "sharding_constraint", "all_gather",
    }
)  # fmt: skip


def checkpoint(f: Function, kept: Kept) -> Function:
    """`f`, with a backward pass that finds the arguments and `kept`, and computes the rest again."""
    return jax.checkpoint(f, policy=_everything_but_copies if kept.everything else _names(kept))


class Remat:
    """What is recomputed in the backward of a pipeline's iteration, and of each layer within it.

    With `remat_iterations` the policy says what an iteration keeps of all its layers. The backward computes the rest
    again for all layers at once; where there are several, only results of matrix products are held between them, and
    what is cheap is computed once more layer by layer. With `remat_layers` they come back one layer at a time, from
    that layer's input: kept if iterations are not rematerialised, and recomputed (a second time through the layer) if
    they are. With neither, an iteration keeps every intermediate value.
    """

    def __init__(self, config: PipelineConfig):
        self._kept = REMAT.get(config.remat_policy)(config)
        self._iterations, self._layers = config.remat_iterations, config.remat_layers

    def iteration(self, f: Function) -> Function:
        """Wraps one iteration of one stage, from choosing its weights on."""
        if self._iterations or self._kept.everything:
            return checkpoint(f, self._kept)
        if not self._layers:
            return checkpoint(f, Kept(everything=True))
        return checkpoint(f, Kept((*self._kept.device, LAYER_INPUT), self._kept.host))

    def layer(self, f: Function, *, is_only: bool) -> Function:
        """Wraps one layer, called as f(parameters, index, x, side inputs, key).

        Args:
          f: the layer.
          is_only: whether an iteration has a single layer.
        """
        if not self._layers:
            return f if is_only or self._kept.everything else checkpoint(f, Kept(MATMULS))
        inner = checkpoint(f, self._kept)

        def named(layer: Any, index: Any, x: Any, side: Any, key: Any) -> Any:
            return inner(layer, index, checkpoint_name(x, LAYER_INPUT), side, key)

        return named


def _names(kept: Kept) -> Any:
    if not kept.host:
        return jax.checkpoint_policies.save_only_these_names(*kept.device)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=kept.device, names_which_can_be_offloaded=kept.host,
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip


def _everything_but_copies(primitive: Any, *_: Any, **params: Any) -> bool:
    return primitive.name not in _COPIES
