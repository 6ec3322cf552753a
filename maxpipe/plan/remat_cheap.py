"""Decide whether a backward computes cheap values layer by layer: `pipeline.remat_cheap`.

The backward of a chunk computes its forward again, all layers at once. It may hold cheap values,
such as norms and activation functions, for all layers, or compute them once more at each layer. The
latter takes less memory, but on TPUs it costs more than the operations themselves: XLA then copies
all weights and saved tensors that the layer reads from their stores.
"""

import numpy as np

from maxpipe.config.catalog import ENGINES
from maxpipe.config.options import update
from maxpipe.config.sections import Config
from maxpipe.config.terminal import Note, ignore_note
from maxpipe.devices.chips import GIB, Tpu
from maxpipe.plan.number import Number, single
from maxpipe.plan.prefetch import IDLE_SHARE
from maxpipe.plan.search.block import BlockSizes, sizes_of_configuration
from maxpipe.plan.search.memory import memory_bytes

KEY = "pipeline.remat_cheap"


def with_remat_cheap(config: Config, tpu: Tpu | None, note: Note = ignore_note) -> Config:
    """Return the configuration with `pipeline.remat_cheap` decided.

    Args:
      config: the resolved configuration, with `pipeline.fsdp_gather` decided.
      tpu: the device's chip; None if it is not a TPU or an unknown one.
      note: function called with the decision and its reason if there is a choice.
    """
    if not ENGINES[config.pipeline.engine].takes(KEY):
        return update(config, {KEY: "true"})
    if config.pipeline.remat_cheap != "auto":
        return config
    sizes = sizes_of_configuration(config, tpu, on_tpus=tpu is not None)
    does = True
    if tpu is not None and _has_choice(sizes) and np.any(_several(sizes)):
        does = bool(np.all(_is_scarce(sizes, tpu)))
        held = single(_cheap_bytes(sizes))
        note(
            f"{KEY}={str(does).lower()}: with at most {held / GIB:.2f} GiB of cheap values held, "
            f"a step takes {'over' if does else 'at most'} {IDLE_SHARE:.0%} of a device's "
            f"{tpu.memory / GIB:.3g} GiB"
        )
    return update(config, {KEY: str(does).lower()})


def computes_cheap_again(sizes: BlockSizes, tpu: Tpu | None) -> Number:
    """Return 1 where a backward of several layers computes cheap values once more, else 0."""
    if not sizes.engine.has_stages or not np.any(several := _several(sizes)):
        return 0.0
    chosen = sizes.config.pipeline.remat_cheap if sizes.engine.takes(KEY) else "true"
    if chosen == "true" or not _has_choice(sizes):
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
    """Return the bytes of cheap values of all layers of a chunk but one."""
    return (sizes.layers - 1) * sizes.saving.cheap * sizes.itemsize * sizes.tokens


def _is_scarce(sizes: BlockSizes, tpu: Tpu) -> Number:
    """Return whether holding cheap values would take more memory than is idle."""
    return np.greater(memory_bytes(sizes) + _cheap_bytes(sizes), IDLE_SHARE * tpu.memory)
