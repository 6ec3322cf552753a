"""Decide whether a backward computes cheap values layer by layer: `pipeline.remat_cheap`.

The backward of a chunk computes its forward again, all layers at once. It may hold cheap values,
such as norms and activation functions, for all layers, or compute them once more at each layer. The
latter takes less memory, but on TPUs it costs more than the operations themselves: XLA then copies
all weights and saved tensors that the layer reads from their stores.
"""

from maxpipe.config.catalog import ENGINES
from maxpipe.config.options import update
from maxpipe.config.sections import Config
from maxpipe.config.terminal import Note, ignore_note
from maxpipe.devices.chips import GIB, Tpu
from maxpipe.pipeline.chunk import remat_policy
from maxpipe.pipeline.layout import build_layout
from maxpipe.plan.estimate import estimate
from maxpipe.plan.footprint import cheap_width, itemsize, microbatch_tokens, on_platform
from maxpipe.plan.prefetch import IDLE_SHARE, splits_backward

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
    does = tpu is None or not _has_choice(config) or _is_scarce(config, tpu, note)
    return update(config, {KEY: str(does).lower()})


def _has_choice(config: Config) -> bool:
    """Return whether chunks have several layers, not in a loop, that are recomputed together.

    Split backwards hold cheap values either way.
    """
    pipeline = config.pipeline
    return (
        build_layout(config).layers_per_stage > 1
        and not pipeline.scan_layers_per_stage
        and pipeline.remat_iterations
        and not pipeline.remat_layers
        and not remat_policy(pipeline).everything
        and not splits_backward(config)
    )


def _is_scarce(config: Config, tpu: Tpu, note: Note) -> bool:
    """Return whether cheap values of all layers but one would take more memory than is idle."""
    others = build_layout(config).layers_per_stage - 1
    cheap = (
        cheap_width(on_platform(config, "tpu"))
        * itemsize(config.model.dtype)
        * microbatch_tokens(config)
    )
    held = others * cheap
    is_scarce = estimate(config, tpu).total + held > IDLE_SHARE * tpu.memory
    note(
        f"{KEY}={str(is_scarce).lower()}: with at most {held / GIB:.2f} GiB of cheap values held, "
        f"a step takes {'over' if is_scarce else 'at most'} {IDLE_SHARE:.0%} of a device's "
        f"{tpu.memory / GIB:.3g} GiB"
    )
    return is_scarce
