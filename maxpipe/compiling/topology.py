"""The devices that `compile.topology` names: a TPU slice that is not there, or this machine's simulated ones."""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import jax

from maxpipe.config import Config, ConfigError, Problem

KEY = "compile.topology"
SIMULATED = "cpu"

# libtpu would ask the cloud's metadata server which machine this is, and complain at length about
# every answer missing.
_NO_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def devices_of(config: Config) -> Sequence[Any]:
    """Devices of `compile.topology`, over all of `compile.num_slices`. Must run before JAX's first use.

    Raises:
      ConfigError: libtpu is not installed, or does not know the topology.
    """
    topology, slices = config.compile.topology, config.compile.num_slices
    # The host's own accelerator is not needed, and looking for one may take long or fail.
    jax.config.update("jax_platforms", "cpu")
    if topology == SIMULATED:
        jax.config.update("jax_num_cpu_devices", max(1, config.mesh.simulated_devices))
        return jax.devices()
    if importlib.util.find_spec("libtpu") is None:
        message = f"{topology} needs libtpu, which also works without a TPU; install it: pip install -e '.[tpu]'"
        raise ConfigError(Problem(KEY, message))
    for name, value in _NO_MACHINE.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    options = {"num_slices": slices} if slices > 1 else {}
    try:
        return topologies.get_topology_desc(topology, platform="tpu", **options).devices
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        example = "v4:2x2x2, v5e:4x4, v5p:4x4x4 or v6e:8x8"
        raise ConfigError(
            Problem(KEY, f"libtpu has no topology {topology}: {reason}; examples: {example}")
        ) from None
