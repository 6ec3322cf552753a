"""Decide whether weights are gathered in steps: `pipeline.fsdp_prefetch`."""

from collections.abc import Callable

from maxpipe.config.catalog import ENGINES
from maxpipe.config.engine_facts import Engine
from maxpipe.config.sections import Config
from maxpipe.config.terminal import Note, ignore_note
from maxpipe.devices.chips import Tpu
from maxpipe.pipeline.manual import BATCH_AXES, ROW_AXES

KEY = "pipeline.fsdp_prefetch"


def changes_step(
    engine: Engine, size: Callable[[str], int], repeats: int = 1, *, casts: bool
) -> bool:
    """Return whether the modes of `pipeline.fsdp_gather` differ for an engine on a mesh.

    Args:
      engine: the engine that runs the model.
      size: mesh axis -> its size.
      repeats: V, repeats of a stage.
      casts: whether parameters are used in a narrower dtype than they are stored in.
    """
    is_split = engine.has_stages and size("fsdp") > 1
    if engine.is_differentiated:
        # Such a loop sums gradients in each iteration over devices with the same weights but
        # different tokens. Over context XLA sums once where a stage has several repeats, whose
        # gradients are parts of one array.
        axes = BATCH_AXES if repeats == 1 else ROW_AXES
        return is_split or any(size(axis) > 1 for axis in axes if axis != "fsdp")
    if engine.lockstep:  # each stage has a part of the head
        return is_split or size("stage") > 1
    # Units that are programs of their own cast weights for themselves.
    return is_split or (not engine.one_program and casts)


def gathers_in_steps(config: Config, tpu: Tpu | None, note: Note = ignore_note) -> bool:
    """Return whether a chunk's weights are gathered in steps from neighbour to neighbour.

    Their transfers, and those of their gradients, run while the chunk computes.

    Args:
      tpu: the device's chip; None if it is not a TPU or an unknown one.
      note: function called with the decision and its reason if there is a choice.
    """
    pipeline, ring = config.pipeline, config.mesh.size("fsdp")
    by_layer = pipeline.scan_layers_per_stage and pipeline.num_layers_per_stage > 1
    can = ENGINES[pipeline.engine].takes(KEY) and not (pipeline.gathers_whole or by_layer)
    if not can or ring == 1:
        return False
    if pipeline.fsdp_prefetch != "auto":
        return pipeline.fsdp_prefetch == "true"
    # Simulated devices have nothing to overlap; GPUs overlap an all-gather with computation anyway.
    if tpu is None:
        return False
    does = ring <= tpu.longest_ring
    note(
        f"{KEY}={str(does).lower()}: mesh axis fsdp has {ring} devices, and steps are chosen for "
        f"up to {tpu.longest_ring} on this chip"
    )
    return does
