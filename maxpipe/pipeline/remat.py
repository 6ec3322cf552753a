"""Rematerialisation: what the backward pass finds saved instead of computing again.

A policy is data, see `maxpipe.config.catalog.RematPolicy`: names of tensors that the model gives by
`checkpoint_name`, and where they are saved. Weights are never among them, gathered or not: the
backward has them anyway, and a pipeline would save a copy for every iteration.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from maxpipe.config.catalog import MATMULS, REMAT_POLICIES, RematPolicy
from maxpipe.config.sections import PipelineConfig

Function = Callable[..., Any]

LAYER_INPUT = "layer_input"

# Everything that happens to a weight between its place at rest and a matrix product. For
# activations these cost next to nothing, so computing them again is no loss there.
_COPIES = frozenset(
    {
        "gather",
        "dynamic_slice",
        "slice",
        "squeeze",
        "reshape",
        "broadcast_in_dim",
        "transpose",
        "convert_element_type",
        "sharding_constraint",
        "all_gather",
    }
)


def remat_policy(config: PipelineConfig) -> RematPolicy:
    """Return the policy of `pipeline.remat_policy`, that of `pipeline.remat_tensors` filled in."""
    policy = REMAT_POLICIES[config.remat_policy]
    if not policy.by_tensor:
        return policy
    places = asdict(config.remat_tensors)
    return RematPolicy(
        device=tuple(name for name, place in places.items() if place == "device"),
        host=tuple(name for name, place in places.items() if place == "offload"),
    )


def checkpoint(f: Function, policy: RematPolicy) -> Function:
    """`f`, with a backward pass that finds the arguments and what the policy saves, and computes the rest again."""
    return jax.checkpoint(f, policy=_everything_but_copies if policy.everything else _names(policy))


class Remat:
    """What is recomputed in the backward of a pipeline's iteration, and of each layer within it.

    With `remat_iterations` the policy says what an iteration keeps of all its layers. The backward
    computes the rest again for all layers at once; where there are several, only results of matrix
    products are held between them, and what is cheap is computed once more layer by layer. With
    `remat_layers` they come back one layer at a time, from that layer's input: kept if iterations
    are not rematerialised, and recomputed (a second time through the layer) if they are. With
    neither, an iteration keeps every intermediate value.
    """

    def __init__(self, config: PipelineConfig):
        self._policy = remat_policy(config)
        self._iterations, self._layers = config.remat_iterations, config.remat_layers

    def iteration(self, f: Function) -> Function:
        """Wraps one iteration of one stage, from choosing its weights on."""
        if self._iterations or self._policy.everything:
            return checkpoint(f, self._policy)
        if not self._layers:
            return checkpoint(f, RematPolicy(everything=True))
        return checkpoint(f, RematPolicy((*self._policy.device, LAYER_INPUT), self._policy.host))

    def layer(self, f: Function, *, is_only: bool) -> Function:
        """Wraps one layer, called as f(parameters, index, x, side inputs, key).

        Args:
          f: the layer.
          is_only: whether an iteration has a single layer.
        """
        if not self._layers:
            return f if is_only or self._policy.everything else checkpoint(f, RematPolicy(MATMULS))
        inner = checkpoint(f, self._policy)

        def named(layer: Any, index: Any, x: Any, side: Any, key: Any) -> Any:
            return inner(layer, index, checkpoint_name(x, LAYER_INPUT), side, key)

        return named


def _names(policy: RematPolicy) -> Any:
    if not policy.host:
        return jax.checkpoint_policies.save_only_these_names(*policy.device)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=policy.device,
        names_which_can_be_offloaded=policy.host,
        offload_src="device",
        offload_dst="pinned_host",
    )


def _everything_but_copies(primitive: Any, *_: Any, **params: Any) -> bool:
    return primitive.name not in _COPIES
