"""Decide how often weights are gathered: `pipeline.fsdp_gather`.

On TPUs a gather in every iteration is exposed, and so is part of one that runs ahead. Gathering all
weights of a stage once is faster by the compiler's estimate, but it holds them and the sums of
their gradients in full. Where the engine can, gathering a repeat ahead is as fast, and with more
than two repeats it holds less.
"""

from maxpipe.config.catalog import ENGINES
from maxpipe.config.options import update
from maxpipe.config.rules.engines import refusals_of
from maxpipe.config.sections import Config
from maxpipe.devices.chips import GIB
from maxpipe.pipeline.chunk import offloaded_names
from maxpipe.pipeline.engines.circular.iterations import unfit_rules
from maxpipe.planning.estimate import estimate
from maxpipe.planning.footprint import axis_rules
from maxpipe.planning.prefetch import KEY as PREFETCH
from maxpipe.planning.prefetch import MEMORY_SHARE, Note, ignore_note

KEY = "pipeline.fsdp_gather"
ROOM = 0.9  # of a device, for everything, since estimates are coarse

_HELD = {
    "once": "whole weights and gradients",
    "per_repeat": "whole weights and gradients of the repeats at work",
}


def with_gather_mode(config: Config, tpu_memory: float | None, note: Note = ignore_note) -> Config:
    """Return the configuration with `pipeline.fsdp_gather` decided.

    Args:
      config: resolved.
      tpu_memory: bytes of a device; None if it is no TPU, or an unknown one.
      note: called with the decision and its reason where both ways are open.
    """
    return update(config, {KEY: _gather_mode(config, tpu_memory, note)})


def _gather_mode(config: Config, tpu_memory: float | None, note: Note) -> str:
    """Return how often weights are gathered."""
    pipeline = config.pipeline
    if pipeline.fsdp_gather != "auto":
        return pipeline.fsdp_gather
    if tpu_memory is None or not _has_weights_to_gather(config):
        return "per_iteration"
    if obstacle := _obstacle(config):
        note(f"{KEY}=per_iteration: {obstacle}")
        return "per_iteration"
    device = f"a device's {tpu_memory / GIB:.3g} GiB"
    iteration = estimate(update(config, {KEY: "per_iteration"}), tpu_memory).total
    # Where an engine has both modes, steps are predicted to be as fast within 1 %.
    totals = {m: estimate(update(config, {KEY: m}), tpu_memory).total for m in _whole_modes(config)}
    mode = min(totals, key=lambda mode: totals[mode])
    what, whole = _HELD[mode], totals[mode]
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


def _has_weights_to_gather(config: Config) -> bool:
    """Return whether weights are split over devices of an engine that gains by whole ones."""
    engine = ENGINES[config.pipeline.engine]
    return engine.has_stages and engine.one_program and config.mesh.size("fsdp") > 1


def _obstacle(config: Config) -> str:
    """Return why this configuration does not go with whole weights; "" if it does."""
    if config.pipeline.fsdp_prefetch == "true":
        return f"{PREFETCH}=true gathers a slot ahead"
    if offloaded_names(config.pipeline):
        # libtpu up to 0.0.46 fails on stores of residuals in the host's memory.
        return "TPU compilers fail on whole weights with residuals in the host's memory"
    if unfit_rules(axis_rules(config)):
        return "sharding.logical_axis_rules do not go with whole weights"
    return ""


def _whole_modes(config: Config) -> list[str]:
    """Return the engine's modes that gather whole weights."""
    refused = [value for r in refusals_of(config.pipeline.engine, KEY) for value in r.values]
    return [mode for mode in _HELD if mode not in refused]
