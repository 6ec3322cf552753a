"""Flags of XLA that a pipeline gains from, per platform: the one place that names them. Imports no JAX.

They are not set by themselves, since they trade memory for overlap and XLA reads them once, when it
is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Recommended:
    """`flags` (name -> value) for the environment variable that the platform's compiler reads."""

    variable: str
    flags: Mapping[str, str]

    def text(self) -> str:
        return " ".join(f"--{name}={value}" for name, value in self.flags.items())


RECOMMENDED = {
    "tpu": Recommended(
        "LIBTPU_INIT_ARGS",
        {
            # Gathers of weights are cut up and run inside the matrix products before the one that
            # needs them.
            "xla_enable_async_all_gather": "true",
            "xla_tpu_enable_async_collective_fusion": "true",
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
            "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
            "xla_tpu_overlap_compute_collective_tc": "true",
            # The head's tokens are dealt out over the stages while a chunk is computed.
            "xla_tpu_enable_async_all_to_all": "true",
        },
    ),
    "gpu": Recommended(
        "XLA_FLAGS",
        {
            "xla_gpu_enable_latency_hiding_scheduler": "true",
            # Transfers get onto the wire even while matrix products fill the other streams.
            "xla_gpu_enable_highest_priority_async_stream": "true",
        },
    ),
}


def advice(platform: str, environment: Mapping[str, str]) -> list[str]:
    """A line about the recommended flags that the environment leaves unset; none if it names them all.

    Args:
      platform: as JAX names it.
      environment: variables of the process. A flag that is set to another value is the user's
        choice.
    """
    recommended = RECOMMENDED.get(platform)
    if recommended is None:
        return []
    words = environment.get(recommended.variable, "").split()
    named = {word.lstrip("-").partition("=")[0] for word in words}
    if named >= set(recommended.flags):
        return []
    return [
        f'XLA flags for overlap, at the price of memory: {recommended.variable}="{recommended.text()}"'
    ]
