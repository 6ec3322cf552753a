"""Decide whether weights are gathered a slot ahead: `pipeline.fsdp_prefetch`."""

from collections.abc import Callable

from jax.sharding import Mesh

from maxpipe.config.catalog import ENGINES
from maxpipe.config.sections import Config
from maxpipe.devices.chips import device_memory
from maxpipe.pipeline.manual import MANUAL_AXES
from maxpipe.planning.footprint import device_parameters, itemsize

KEY = "pipeline.fsdp_prefetch"
MEMORY_SHARE = 0.05  # of a device, for the chunks that are in memory in full
LONGEST_RING = 4  # devices of mesh axis fsdp


def gathers_ahead(config: Config, mesh: Mesh, note: Callable[[str], None]) -> bool:
    """Return whether a chunk's weights are gathered a slot ahead of the unit that reads them.

    Two chunks are then in memory in full, that of a tick's F and that of its B, instead of a layer.

    Args:
      config: resolved.
      mesh: all devices.
      note: called with the decision and its reason where both ways are open.
    """
    pipeline, ring = config.pipeline, mesh.shape["fsdp"]
    layers = pipeline.num_layers_per_stage
    gathers_layer_by_layer = pipeline.scan_layers_per_stage and layers > 1
    if (
        not ENGINES[pipeline.engine].takes(KEY)
        or pipeline.gathers_whole
        or gathers_layer_by_layer
        or ring == 1
    ):
        return False
    if pipeline.fsdp_prefetch != "auto":
        return pipeline.fsdp_prefetch == "true"
    # Simulated devices have nothing to overlap; GPUs run an all-gather during computation as it is.
    devices = list(mesh.devices.flat)
    memory = device_memory(devices)
    if devices[0].platform != "tpu":
        return False
    if memory is None:
        note(f"{KEY}=false: the memory of {devices[0].device_kind} is not known")
        return False
    if ring > LONGEST_RING:
        note(
            f"{KEY}=false: every weight takes a transfer to each of {ring} devices of mesh axis "
            f"fsdp, and with more than {LONGEST_RING} compiling takes long"
        )
        return False
    required = _gathered_bytes(config)
    is_small = required <= MEMORY_SHARE * memory
    note(
        f"{KEY}={str(is_small).lower()}: two gathered chunks take {required / 2**30:.2f} GiB, "
        f"{'at most' if is_small else 'more than'} {MEMORY_SHARE:.0%} of a device's "
        f"{memory / 2**30:.3g} GiB"
    )
    return is_small


def gathers_ahead_in(config: Config, capacity: float | None) -> bool:
    """Return the same of a TPU with so much memory, in bytes; None if it is not known."""
    pipeline, ring = config.pipeline, config.mesh.size("fsdp")
    scans = pipeline.scan_layers_per_stage and pipeline.num_layers_per_stage > 1
    if not ENGINES[pipeline.engine].takes(KEY) or scans or ring == 1:
        return False
    if pipeline.gathers_whole or pipeline.fsdp_prefetch != "auto":
        return not pipeline.gathers_whole and pipeline.fsdp_prefetch == "true"
    is_known = capacity is not None and ring <= LONGEST_RING
    return is_known and _gathered_bytes(config) <= MEMORY_SHARE * (capacity or 0.0)


def _gathered_bytes(config: Config) -> float:
    """Return the bytes of two gathered chunks."""
    layer = device_parameters(config, "layers", whole_over=MANUAL_AXES)
    return 2 * config.pipeline.num_layers_per_stage * layer * itemsize(config.model.dtype)
