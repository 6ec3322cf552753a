"""Two stages with weights split over devices, for what is decided by the kind of chip."""

from dataclasses import dataclass
from typing import Any

from helpers.engines import tiny
from maxpipe.config import Config


@dataclass(frozen=True)
class Device:
    """What is asked of a device of a mesh; a TPU v5p unless told otherwise."""

    device_kind: str = "TPU v5p"
    platform: str = "tpu"
    coords: tuple[int, ...] = (0, 0, 0)


V5P = Device()


def config_of(**values: Any) -> Config:
    """Return two lockstep stages with weights split over four devices, in three microbatches."""
    words = "engine=scheduled schedule=lockstep_1f1b num_repeats=1 num_microbatches=3"
    return tiny(f"{words} stage=2 fsdp=4 global_batch_size=48", **values)
