"""Decide what `auto` means: how weights are gathered, and which values are computed again.

On TPUs a gather in every iteration is exposed, and one in steps needs copies. Gathering all weights
of a stage once is faster by the compiler's estimate, but holds them and the sums of their gradients
in full. Where the engine can, gathering a repeat ahead is as fast, and with more than two repeats
it holds less. These modes also pay without split weights: the circular engine sums gradients over
devices with the same weights once, lockstep engines gather the head once, and units of the mpmd
engine read weights that were cast beforehand.

The backward of a chunk computes its forward again, all layers at once. It may hold cheap values,
such as norms and activation functions, for all layers, or compute them once more at each layer,
which takes less memory. But on TPUs XLA then copies all that the layer reads from its stores.
"""

import numpy as np

from maxpipe.config.catalog import ENGINES
from maxpipe.config.options import update
from maxpipe.config.rules.engines import CONTEXT_STRATEGY, refusals_of
from maxpipe.config.sections import Config
from maxpipe.config.terminal import Note, ignore_note
from maxpipe.devices.chips import GIB, Tpu
from maxpipe.pipeline.chunk import offloaded_names
from maxpipe.pipeline.engines.circular.phases import unfit_rules
from maxpipe.plan.auto_stages import LIMIT_KEY, choose_stages, predict
from maxpipe.plan.device_parameters import bound_rules, mesh_sizes, rules_of
from maxpipe.plan.estimate import estimate
from maxpipe.plan.footprint import PREFETCH, changes_step, on_platform
from maxpipe.plan.number import Number, single
from maxpipe.plan.search.block import KEYS_SHARE, BlockSizes, sizes_of_configuration
from maxpipe.plan.search.memory import memory_bytes

GATHER = "pipeline.fsdp_gather"
CHEAP = "pipeline.remat_cheap"
IDLE_SHARE = 0.5  # whole weights and cheap values are held if a step takes less of a device
MEMORY_SHARE = 0.05  # share of a device's memory for weights and gradients that are held in full
ROOM = 0.9  # share of a device's memory for everything, since estimates are coarse


def with_gather_mode(config: Config, tpu: Tpu | None, note: Note = ignore_note) -> Config:
    """Return the configuration with `pipeline.fsdp_gather` decided; say why if there is a choice.

    `tpu` is the device's chip, None if it is not a TPU or an unknown one, here and below.
    """
    mode = config.pipeline.fsdp_gather
    if mode == "auto":
        mode, reason = _gather_mode(config, tpu)
        if reason:
            note(f"{GATHER}={mode}: {reason}")
    return update(config, {GATHER: mode})


def _gather_mode(config: Config, tpu: Tpu | None) -> tuple[str, str]:
    """Return the mode and the reason for it, "" where nothing is decided."""
    pipeline, engine = config.pipeline, ENGINES[config.pipeline.engine]
    casts = config.model.narrows_parameters
    is_open = changes_step(engine, config.mesh.size, pipeline.num_repeats, casts=casts)
    if tpu is None or not is_open:
        return "per_iteration", ""
    if obstacle := _obstacle(config):
        return "per_iteration", obstacle
    memory = tpu.memory
    if pipeline.memory_limit_gib and pipeline.layers_per_stage and engine.takes(LIMIT_KEY):
        # The stages have been chosen to stay below this limit.
        memory = min(memory, GIB * pipeline.memory_limit_gib)
    refused = [value for r in refusals_of(pipeline.engine, GATHER) for value in r.values]
    modes = [mode for mode in ("once", "per_repeat") if mode not in refused]
    iteration, *totals = (
        needed_bytes(update(config, {GATHER: mode}), tpu) for mode in ("per_iteration", *modes)
    )
    choices = [*zip(modes, totals, strict=True)]
    if config.mesh.dcn.fsdp == 1:
        # Predicted times differ by at most 1 %, so the mode with less memory comes first. Between
        # slices `once` does, since gathers per repeat are not all hidden there.
        choices.sort(key=lambda choice: choice[1])
    for mode, whole in choices:
        extra = max(0.0, whole - iteration)
        reason = (
            f"{mode} takes {extra / GIB:.2f} GiB more than per_iteration, a step "
            f"{whole / GIB:.3g} GiB of a device's {memory / GIB:.3g} GiB"
        )
        is_little = extra <= MEMORY_SHARE * memory or whole <= IDLE_SHARE * memory
        if is_little and whole <= ROOM * memory:
            return mode, reason
    return "per_iteration", reason


def needed_bytes(config: Config, tpu: Tpu | None) -> float:
    """Return the bytes that a step needs on a device, or on a device of the fullest stage."""
    if ENGINES[config.pipeline.engine].one_program:
        return estimate(with_gather_mode(config, tpu), tpu).total
    config = on_platform(config, "tpu") if tpu else config
    # A run has chosen its stages before; a caller that only asks what a file would do has not.
    config = choose_stages(update(config, {LIMIT_KEY: 0}), None, ignore_note)
    stages = predict(with_gather_mode(config, tpu), on_tpus=tpu is not None)
    return float(stages.memory.max())


def _obstacle(config: Config) -> str:
    """Return why this configuration rules out whole weights; "" if it does not."""
    if config.pipeline.fsdp_prefetch == "true":
        return f"{PREFETCH}=true gathers in steps"
    if ENGINES[config.pipeline.engine].one_program and offloaded_names(config.pipeline):
        # libtpu up to 0.0.46 fails on stores of residuals in the host's memory.
        return "TPU compilers fail on whole weights with residuals in the host's memory"
    if unfit_rules(bound_rules(rules_of(config), mesh_sizes(config))):
        return "sharding.logical_axis_rules do not go with whole weights"
    return ""


def gathers_in_steps(config: Config, tpu: Tpu | None, note: Note = ignore_note) -> bool:
    """Return whether a chunk's weights are gathered in steps from neighbour to neighbour.

    Their transfers, and those of their gradients, run while the chunk computes.
    """
    pipeline, ring = config.pipeline, config.mesh.size("fsdp")
    by_layer = pipeline.scan_layers_per_stage and pipeline.num_layers_per_stage > 1
    can = ENGINES[pipeline.engine].takes(PREFETCH) and not (pipeline.gathers_whole or by_layer)
    if not can or ring == 1:
        return False
    if pipeline.fsdp_prefetch != "auto":
        return pipeline.fsdp_prefetch == "true"
    # Simulated devices have nothing to overlap; GPUs overlap an all-gather with computation anyway.
    if tpu is None:
        return False
    does = ring <= tpu.longest_ring
    note(
        f"{PREFETCH}={str(does).lower()}: mesh axis fsdp has {ring} devices, and steps are "
        f"chosen for up to {tpu.longest_ring} on this chip"
    )
    return does


def with_context_strategy(config: Config, tpu: Tpu | None, note: Note = ignore_note) -> Config:
    """Return the configuration with `sharding.context_strategy` decided; see `KEYS_SHARE`."""
    if config.mesh.size("context") == 1:
        return config
    sizes = sizes_of_configuration(config, tpu, on_tpus=tpu is not None)
    if not np.any(sizes.in_ring):
        return update(config, {CONTEXT_STRATEGY: "gather"})
    if config.sharding.context_strategy == "auto" and tpu is not None:
        note(
            f"{CONTEXT_STRATEGY}=ring: keys and values gathered for a microbatch, with their "
            f"gradients, would take {single(sizes.gathered_keys) / GIB:.2f} GiB, over "
            f"{KEYS_SHARE:.0%} of a device's {tpu.memory / GIB:.3g} GiB"
        )
    # Devices of idle stages have to take part in a ring's transfers.
    return update(config, {CONTEXT_STRATEGY: "ring", "pipeline.skip_idle": "false"})


def with_remat_cheap(config: Config, tpu: Tpu | None, note: Note = ignore_note) -> Config:
    """Return the configuration with `pipeline.remat_cheap` decided, after `fsdp_gather`."""
    if not ENGINES[config.pipeline.engine].takes(CHEAP):
        return update(config, {CHEAP: "true"})
    if config.pipeline.remat_cheap != "auto":
        return config
    sizes = sizes_of_configuration(config, tpu, on_tpus=tpu is not None)
    does = True
    if tpu is not None and _has_choice(sizes) and np.any(_several(sizes)):
        does = bool(np.all(_is_scarce(sizes, tpu)))
        held = single(_cheap_bytes(sizes))
        note(
            f"{CHEAP}={str(does).lower()}: with at most {held / GIB:.2f} GiB of cheap values held, "
            f"a step takes {'over' if does else 'at most'} {IDLE_SHARE:.0%} of a device's "
            f"{tpu.memory / GIB:.3g} GiB"
        )
    return update(config, {CHEAP: str(does).lower()})


def computes_cheap_again(sizes: BlockSizes, tpu: Tpu | None) -> Number:
    """Return 1 where a backward of several layers computes cheap values once more, else 0."""
    several = _several(sizes) * sizes.engine.has_stages
    chosen = sizes.config.pipeline.remat_cheap if sizes.engine.takes(CHEAP) else "true"
    if chosen == "true" or not (_has_choice(sizes) and np.any(several)):
        return several
    if chosen == "false":
        return 0.0
    return several if tpu is None else several * _is_scarce(sizes, tpu)


def _several(sizes: BlockSizes) -> Number:
    """Return 1 where chunks have several layers that are recomputed together, else 0."""
    saving = sizes.saving
    is_recomputed = np.greater(saving.held, saving.residuals) * (1.0 - saving.saves_all)
    return (sizes.layers > 1) * is_recomputed


def _has_choice(sizes: BlockSizes) -> bool:
    """Return whether a backward may hold cheap values or not; split ones hold them either way."""
    by_layer = sizes.config.pipeline.scan_layers_per_stage or sizes.config.pipeline.remat_layers
    return not (by_layer or sizes.splits_backward)


def _cheap_bytes(sizes: BlockSizes) -> Number:
    return (sizes.layers - 1) * sizes.saving.cheap * sizes.itemsize * sizes.tokens


def _is_scarce(sizes: BlockSizes, tpu: Tpu) -> Number:
    return np.greater(memory_bytes(sizes) + _cheap_bytes(sizes), IDLE_SHARE * tpu.memory)
