"""Decide how often weights are gathered: `pipeline.fsdp_gather`.

On TPUs a gather in every iteration is exposed, and so is part of one that runs ahead. Gathering all
weights of a stage once is faster by the compiler's estimate, but it holds them and the sums of
their gradients in full.
"""

from collections.abc import Callable

from jax.sharding import Mesh

from maxpipe.config.catalog import ENGINES
from maxpipe.config.options import update
from maxpipe.config.sections import Config
from maxpipe.devices.chips import GIB, device_memory
from maxpipe.planning.estimate import estimate

KEY = "pipeline.fsdp_gather"
MEMORY_SHARE = 0.05  # of a device, for what is whole
ROOM = 0.9  # of a device, for everything, since estimates are coarse

Note = Callable[[str], None]


def ignore(text: str) -> None:
    """Drop a line that has been printed already."""


def with_gather_mode(config: Config, mesh: Mesh, note: Note = ignore) -> Config:
    """Return the configuration with `pipeline.fsdp_gather` decided.

    Args:
      config: resolved.
      mesh: all devices.
      note: called with the decision and its reason where both ways are open.
    """
    devices = list(mesh.devices.flat)
    memory = device_memory(devices) if devices[0].platform == "tpu" else None
    return update(config, {KEY: gather_mode(config, memory, note)})


def gather_mode(config: Config, tpu_memory: float | None, note: Note = ignore) -> str:
    """Return how often weights are gathered.

    Args:
      config: resolved.
      tpu_memory: bytes of a device; None if it is no TPU, or an unknown one.
      note: as for `with_gather_mode`.
    """
    pipeline = config.pipeline
    if pipeline.fsdp_gather != "auto":
        return pipeline.fsdp_gather
    is_open = ENGINES[pipeline.engine].lockstep and config.mesh.size("fsdp") > 1
    if not is_open or pipeline.fsdp_prefetch == "true" or tpu_memory is None:
        return "per_iteration"
    once, iteration = (
        estimate(update(config, {KEY: mode})).total for mode in ("once", "per_iteration")
    )
    more, device = f"{(once - iteration) / GIB:.2f} GiB", f"a device's {tpu_memory / GIB:.3g} GiB"
    if once - iteration > MEMORY_SHARE * tpu_memory:
        reason = f"whole weights and gradients would take {more} more, over {MEMORY_SHARE:.0%}"
    elif once > ROOM * tpu_memory:
        reason = f"with whole weights a step would take over {ROOM:.0%}"
    else:
        note(
            f"{KEY}=once: whole weights and gradients take {more} more, at most "
            f"{MEMORY_SHARE:.0%} of {device}"
        )
        return "once"
    note(f"{KEY}=per_iteration: {reason} of {device}")
    return "per_iteration"
