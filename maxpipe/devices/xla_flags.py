"""Recommend flags of XLA from which a pipeline gains, per platform. Imports no JAX.

maxpipe does not set them: they trade memory for overlap, and XLA reads them once, when it is
loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Recommended:
    """Flags by name, and the environment variable from which the platform's compiler reads them."""

    variable: str
    flags: Mapping[str, str]

    def text(self) -> str:
        """Return the flags as the variable's value."""
        return " ".join(f"--{name}={value}" for name, value in self.flags.items())


RECOMMENDED = {
    "tpu": Recommended(
        "LIBTPU_INIT_ARGS",
        {
            # XLA cuts gathers of weights into pieces and runs them inside the matrix products
            # before the one that needs them.
            "xla_enable_async_all_gather": "true",
            "xla_tpu_enable_async_collective_fusion": "true",
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
            "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
            "xla_tpu_overlap_compute_collective_tc": "true",
            # The head's tokens are distributed over the stages while a chunk is computed.
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
    """Return a line on the recommended flags if the environment leaves one unset, else no line.

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
        f"XLA flags for overlap, at the price of memory: {recommended.variable}="
        f'"{recommended.text()}"'
    ]
