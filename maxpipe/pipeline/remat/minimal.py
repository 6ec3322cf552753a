"""Save the outputs of the layer's matrix products; recompute norms, rotations, softmax and activations."""

from collections.abc import Callable
from typing import Any

import jax

from maxpipe.pipeline.remat import REMAT

SAVED = ("query_proj", "key_proj", "value_proj", "context", "out_proj", "mlp_gate", "mlp_up", "mlp_down")


@REMAT.register()
def minimal(layer: Callable[..., Any]) -> Callable[..., Any]:
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*SAVED))
