"""Decide how often weights are gathered: `pipeline.fsdp_gather`.

On TPUs a gather in every iteration is exposed, and so is part of one that runs ahead. Gathering all
weights of a stage once is faster by the compiler's estimate, but it holds them and the sums of
their gradients in full. Where the engine can, gathering a repeat ahead holds less and is about as
fast, though it gathers more often.
"""

from collections.abc import Callable

from jax.sharding import Mesh

from maxpipe.config.catalog import ENGINES
from maxpipe.config.options import update
from maxpipe.config.rules.engines import refusals_of
from maxpipe.config.sections import Config
from maxpipe.devices.chips import GIB, device_memory
from maxpipe.pipeline.chunk import offloaded_names
from maxpipe.pipeline.engines.circular.iterations import unfit_rules
from maxpipe.planning.estimate import estimate
from maxpipe.planning.footprint import axis_rules

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
    if pipeline.fsdp_prefetch == "true" or tpu_memory is None or not _can_gather_whole(config):
        return "per_iteration"
    device = f"a device's {tpu_memory / GIB:.3g} GiB"
    iteration = estimate(update(config, {KEY: "per_iteration"})).total
    reason = ""
    for mode, what in _whole_modes(config).items():
        whole = estimate(update(config, {KEY: mode})).total
        extra = max(0.0, whole - iteration)
        more = f"{extra / GIB:.2f} GiB more"
        if extra > MEMORY_SHARE * tpu_memory:
            reason = f"{what} would take {more}, over {MEMORY_SHARE:.0%} of {device}"
        elif whole > ROOM * tpu_memory:
            reason = f"with {what} a step would take over {ROOM:.0%} of {device}"
        else:
            note(f"{KEY}={mode}: {what} take {more}, at most {MEMORY_SHARE:.0%} of {device}")
            return mode
    note(f"{KEY}=per_iteration: {reason}")
    return "per_iteration"


def _can_gather_whole(config: Config) -> bool:
    """Return whether the engine runs this configuration on whole weights, and gains by it."""
    engine = ENGINES[config.pipeline.engine]
    if not (engine.has_stages and engine.one_program) or config.mesh.size("fsdp") == 1:
        return False
    # libtpu up to 0.0.46 fails on stores of residuals in the host's memory.
    return not offloaded_names(config.pipeline) and not unfit_rules(axis_rules(config))


def _whole_modes(config: Config) -> dict[str, str]:
    """Return the engine's modes that gather whole weights, fastest first, and what they hold."""
    modes = {
        "once": "whole weights and gradients",
        "per_repeat": "whole weights and gradients of the repeats at work",
    }
    refused = [value for r in refusals_of(config.pipeline.engine, KEY) for value in r.values]
    return {mode: what for mode, what in modes.items() if mode not in refused}
