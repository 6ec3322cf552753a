"""Decide how often weights are gathered: `pipeline.fsdp_gather`.

On TPUs a gather in every iteration is exposed, and one in steps needs copies. Gathering all
weights of a stage once is faster by the compiler's estimate, but it holds them and the sums of
their gradients in full. Where the engine can, gathering a repeat ahead is as fast, and with more
than two repeats it holds less. The same modes also pay without split weights: the circular engine
sums gradients over devices with the same weights once, lockstep engines gather the head once, and
units of the mpmd engine read weights that were cast beforehand.
"""

from maxpipe.config.catalog import ENGINES
from maxpipe.config.options import update
from maxpipe.config.rules.engines import refusals_of
from maxpipe.config.sections import Config
from maxpipe.config.terminal import Note, ignore_note
from maxpipe.devices.chips import GIB, Tpu
from maxpipe.pipeline.chunk import offloaded_names
from maxpipe.pipeline.engines.circular.phases import unfit_rules
from maxpipe.plan.auto_stages import LIMIT_KEY, choose_stages, predict
from maxpipe.plan.device_parameters import axis_rules
from maxpipe.plan.estimate import estimate
from maxpipe.plan.footprint import on_platform
from maxpipe.plan.prefetch import IDLE_SHARE, changes_step, sharing_axes
from maxpipe.plan.prefetch import KEY as PREFETCH

KEY = "pipeline.fsdp_gather"
MEMORY_SHARE = 0.05  # share of a device's memory for weights and gradients that are held in full
ROOM = 0.9  # share of a device's memory for everything, since estimates are coarse

_HELD = {
    "once": "whole weights and gradients",
    "per_repeat": "whole weights and gradients of the repeats at work",
}


def with_gather_mode(config: Config, tpu: Tpu | None, note: Note = ignore_note) -> Config:
    """Return the configuration with `pipeline.fsdp_gather` decided.

    Args:
      tpu: the device's chip; None if it is not a TPU or an unknown one.
      note: function called with the decision and its reason if there is a choice.
    """
    return update(config, {KEY: _gather_mode(config, tpu, note)})


def _gather_mode(config: Config, tpu: Tpu | None, note: Note) -> str:
    pipeline = config.pipeline
    if pipeline.fsdp_gather != "auto":
        return pipeline.fsdp_gather
    engine = ENGINES[pipeline.engine]
    is_open = changes_step(
        engine, config.mesh.size, pipeline.num_repeats, casts=config.model.narrows_parameters
    )
    if tpu is None or not is_open:
        return "per_iteration"
    if obstacle := _obstacle(config):
        note(f"{KEY}=per_iteration: {obstacle}")
        return "per_iteration"
    memory = tpu.memory
    if pipeline.memory_limit_gib and pipeline.layers_per_stage and engine.takes(LIMIT_KEY):
        # The stages have been chosen to stay below this limit.
        memory = min(memory, GIB * pipeline.memory_limit_gib)
    iteration = needed_bytes(update(config, {KEY: "per_iteration"}), tpu)
    totals = {m: needed_bytes(update(config, {KEY: m}), tpu) for m in _whole_modes(config)}
    if config.mesh.dcn.fsdp == 1:
        # Predicted times differ by at most 1 %, so the mode with less memory comes first. Between
        # slices `once` does, since gathers per repeat are not all hidden there.
        totals = dict(sorted(totals.items(), key=lambda item: item[1]))
    reason = ""
    for mode, whole in totals.items():
        extra = max(0.0, whole - iteration)
        more = f"{extra / GIB:.2f} GiB more, a step {whole / GIB:.3g}"
        more += f" of a device's {memory / GIB:.3g} GiB"
        is_little = extra <= MEMORY_SHARE * memory or whole <= IDLE_SHARE * memory
        if is_little and whole <= ROOM * memory:
            note(f"{KEY}={mode}: {_held(config, mode)} take {more}")
            return mode
        reason = f"{_held(config, mode)} would take {more}"
    note(f"{KEY}=per_iteration: {reason}")
    return "per_iteration"


def needed_bytes(config: Config, tpu: Tpu | None) -> float:
    """Return the bytes that a step needs on a device, or on a device of the fullest stage.

    Args:
      tpu: the device's chip; None if it is not a TPU or an unknown one.

    Raises:
      ScheduleError: the schedule cannot be built.
    """
    if ENGINES[config.pipeline.engine].one_program:
        return estimate(with_gather_mode(config, tpu), tpu).total
    config = on_platform(config, "tpu") if tpu else config
    # A run has chosen its stages before; a caller that only asks what a file would do has not.
    config = choose_stages(update(config, {LIMIT_KEY: 0}), None, ignore_note)
    stages = predict(with_gather_mode(config, tpu), on_tpus=tpu is not None)
    return float(stages.memory.max())


def _held(config: Config, mode: str) -> str:
    """Return what a mode holds, as the subject of a note's sentence."""
    if config.mesh.size("fsdp") > 1:
        return _HELD[mode]
    engine = ENGINES[config.pipeline.engine]
    if engine.lockstep:
        return "weights of the head, whole all step long,"
    if not engine.one_program:
        return f"weights in {config.model.dtype}, cast once a step,"
    axes = sharing_axes(config.mesh.size, config.pipeline.num_repeats)
    return f"sums of gradients over {', '.join(axes)} once a step"


def _obstacle(config: Config) -> str:
    """Return why this configuration rules out whole weights; "" if it does not."""
    if config.pipeline.fsdp_prefetch == "true":
        return f"{PREFETCH}=true gathers in steps"
    if ENGINES[config.pipeline.engine].one_program and offloaded_names(config.pipeline):
        # libtpu up to 0.0.46 fails on stores of residuals in the host's memory.
        return "TPU compilers fail on whole weights with residuals in the host's memory"
    if unfit_rules(axis_rules(config)):
        return "sharding.logical_axis_rules do not go with whole weights"
    return ""


def _whole_modes(config: Config) -> list[str]:
    """Return the engine's modes that gather whole weights, the one with fewest gathers first."""
    refused = [value for r in refusals_of(config.pipeline.engine, KEY) for value in r.values]
    return [mode for mode in _HELD if mode not in refused]
