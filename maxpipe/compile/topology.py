"""Make the devices that `compile.topology` names.

They belong to a TPU slice that need not be there, or are simulated on this machine.
"""

import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from maxpipe.compile.checks import SIMULATED, TOPOLOGY, check_slice
from maxpipe.config import Config, ConfigError, Problem
from maxpipe.config.slices import canonical_topology, examples_of
from maxpipe.devices.chips import coordinates, slice_of
from maxpipe.devices.start import NO_MACHINE

# Without these libtpu asks the cloud's metadata server which machine this is, and logs every
# missing answer.
_NO_MACHINE = NO_MACHINE | {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# Both cores of a v4 chip as one JAX device, as the cloud runs them: JAX makes no mesh of single
# cores.
_CHIP_CONFIGS = {"v4": "megacore"}


def devices_of(config: Config) -> Sequence[jax.Device]:
    """Return the devices of `compile.topology`, over all of `compile.num_slices`.

    Must run before JAX is used for the first time.
    """
    topology = config.compile.topology
    slices = config.compile.num_slices
    # The host's own accelerator is not needed; looking for one may take long or fail.
    jax.config.update("jax_platforms", "cpu")
    if topology == SIMULATED:
        jax.config.update("jax_num_cpu_devices", max(1, config.mesh.simulated_devices))
        return jax.devices()
    topology = canonical_topology(topology)
    check_slice(topology)
    try:
        return _described(topology, slices)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        usual = ", ".join(examples_of(topology))
        raise ConfigError(
            Problem(TOPOLOGY, f"libtpu has no topology {topology}: {reason}; usual slices: {usual}")
        ) from None


def _described(topology: str, slices: int) -> Sequence[jax.Device]:
    for name, value in _NO_MACHINE.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    options: dict[str, int | str | tuple[int, ...]] = {"num_slices": slices} if slices > 1 else {}
    if topology.endswith(":1x1"):
        options["chips_per_host_bounds"] = (1, 1, 1)  # libtpu takes hosts to have at least 2 x 2
    if chip_config := _CHIP_CONFIGS.get(topology.partition(":")[0]):
        options["chip_config_name"] = chip_config
    return topologies.get_topology_desc(topology, platform="tpu", **options).devices


def meshes_to_compile(config: Config, meshes: Sequence[Mesh]) -> list[Mesh]:
    """Return for each stage a mesh whose devices make up all slices of a topology.

    libtpu compiles no program that leaves out a slice of its topology. A stage on only some slices
    gets devices of a topology with as many slices, at the same places; other meshes do not change.
    """
    total = len({slice_of(d) for mesh in meshes for d in mesh.devices.flat})
    described: dict[int, dict[tuple[int, ...], jax.Device]] = {}
    alone = []
    for mesh in meshes:
        slices = sorted({slice_of(d) for d in mesh.devices.flat})
        count = len(slices)
        if count == total:
            alone.append(mesh)
            continue
        if count not in described:
            devices = _described(canonical_topology(config.compile.topology), count)
            described[count] = {(slice_of(d), *_place(d)): d for d in devices}
        grid = np.empty(mesh.devices.shape, object)
        for index, d in np.ndenumerate(mesh.devices):
            grid[index] = described[count][slices.index(slice_of(d)), *_place(d)]
        alone.append(Mesh(grid, mesh.axis_names))
    return alone


def neighbour_bandwidth(meshes: Sequence[Mesh], link: float, dcn: float | None) -> float | None:
    """Return the bytes/s between the slowest pair of neighbouring stages; None if unknown."""
    slices = [[slice_of(d) for d in mesh.devices.flat] for mesh in meshes]
    return link if all(of_stage == slices[0] for of_stage in slices) else dcn


def _place(device: jax.Device) -> tuple[int, ...]:
    return (*coordinates(device), getattr(device, "core_on_chip", 0))
