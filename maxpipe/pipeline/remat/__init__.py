"""Rematerialisation policies: what the backward pass finds saved instead of computing again.

A policy is data: the names of tensors that the model gives by `checkpoint_name`, and where they wait. Weights are
never among them, gathered or not: they are at hand when the backward runs, and a pipeline would keep a copy for every
iteration.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from maxpipe.registry import Registry

# Names of a decoder layer's tensors; those of a mixture's experts are the same as of an MLP.
QKV = ("query_proj", "key_proj", "value_proj")
MATMULS = (*QKV, "context", "out_proj", "mlp_gate", "mlp_up", "mlp_down")


@dataclass(frozen=True)
class Kept:
    """What is kept from forward to backward beside the inputs.

    Attributes:
      device: names of tensors kept on the device.
      host: names of tensors that wait in the host's memory.
      everything: all intermediate values, whatever their name; weights and copies of them excepted.
    """

    device: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    everything: bool = False


# A variant takes `pipeline.*` and says what is kept.
REMAT: Registry[Callable[[Any], Kept]] = Registry(__name__, __path__, "pipeline.remat_policy")
