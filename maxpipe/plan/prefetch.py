"""Decide whether weights are gathered in steps: `pipeline.fsdp_prefetch`."""

from collections.abc import Callable

from maxpipe.config.catalog import ENGINES
from maxpipe.config.engine_facts import Engine
from maxpipe.config.sections import Config
from maxpipe.config.terminal import Note, ignore_note
from maxpipe.devices.chips import Tpu
from maxpipe.pipeline.manual import BATCH_AXES, ROW_AXES

KEY = "pipeline.fsdp_prefetch"
IDLE_SHARE = 0.5  # whole weights and cheap values are held if a step takes less of a device


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
        return is_split or bool(sharing_axes(size, repeats))
    if engine.lockstep:  # each stage has a part of the head
        return is_split or size("stage") > 1
    # Units that are programs of their own cast weights for themselves.
    return is_split or (not engine.one_program and casts)


def sharing_axes(size: Callable[[str], int], repeats: int) -> list[str]:
    """Return the mesh axes along which a differentiated loop sums gradients in each iteration.

    Devices along them have the same weights but different tokens. Over context XLA sums once where
    a stage has several repeats, whose gradients are parts of one array.
    """
    axes = BATCH_AXES if repeats == 1 else ROW_AXES
    return [axis for axis in axes if axis != "fsdp" and size(axis) > 1]


def gathers_in_steps(config: Config, tpu: Tpu | None, note: Note = ignore_note) -> bool:
    """Return whether a chunk's weights are gathered in steps from neighbour to neighbour.

    Their transfers, and those of their gradients, run while the chunk computes.

    Args:
      tpu: the device's chip; None if it is not a TPU or an unknown one.
      note: function called with the decision and its reason if there is a choice.
    """
    if not _can_gather_in_steps(config):
        return False
    if config.pipeline.fsdp_prefetch != "auto":
        return config.pipeline.fsdp_prefetch == "true"
    # Simulated devices have nothing to overlap; GPUs overlap an all-gather with computation anyway.
    if tpu is None:
        return False
    ring = config.mesh.size("fsdp")
    if ring > tpu.longest_ring:
        note(
            f"{KEY}=false: mesh axis fsdp has {ring} devices, and steps are chosen for up to "
            f"{tpu.longest_ring} on this chip; compile with true to compare"
        )
        return False
    note(
        f"{KEY}=true: transfers between the {ring} devices of mesh axis fsdp run during computation"
    )
    return True


def _can_gather_in_steps(config: Config) -> bool:
    """Return whether the engine has weights to gather, and can do it in steps."""
    pipeline = config.pipeline
    gathers_layer_by_layer = pipeline.scan_layers_per_stage and pipeline.num_layers_per_stage > 1
    return (
        ENGINES[pipeline.engine].takes(KEY)
        and not pipeline.gathers_whole
        and not gathers_layer_by_layer
        and config.mesh.size("fsdp") > 1
    )
