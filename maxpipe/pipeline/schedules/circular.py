"""The circular pipeline: all microbatches through one chunk of every stage, then through the next chunk."""

import numpy as np

from maxpipe.pipeline.schedules import SCHEDULES
from maxpipe.pipeline.schedules._schedule import Schedule
from maxpipe.pipeline.schedules._table import Table, from_ticks


@SCHEDULES.register()
class Circular(Schedule):
    """Breadth-first over chunks; the backward mirrors the forward in time, as differentiating the loop does.

    Stage s runs microbatch m of chunk c at tick c*max(M, d*S) + m + d*s. From MaxText and Praxis; called
    looped breadth-first by Lamy-Poirier, arXiv:2211.05953. For M >= d*S

        ticks      M*V + d(S-1) forward, the same backward
        bubble     d(S-1) / (M*V + d(S-1)) of the time
        in flight  M*V on every stage
    """

    engines = ("circular",)
    fixed_repeats = None
    delayable = True

    @classmethod
    def _build(
        cls, num_stages: int, num_microbatches: int, num_repeats: int, forwarding_delay: int, slack: int
    ) -> Table:
        return breadth_first(cls.name(), num_stages, num_microbatches, num_repeats, forwarding_delay)


def breadth_first(
    name: str, num_stages: int, num_microbatches: int, num_repeats: int, forwarding_delay: int
) -> Table:
    """The lockstep table of the class above."""
    repeat, stage = np.divmod(np.arange(num_repeats * num_stages), num_stages)
    stride = max(num_microbatches, forwarding_delay * num_stages)
    forward = np.arange(num_microbatches)[:, None] + stride * repeat + forwarding_delay * stage
    backward = 2 * (int(forward.max()) + 1) - 1 - forward
    return from_ticks(
        name,
        num_stages,
        num_repeats,
        {"F": forward, "B": backward},
        lockstep=True,
        forwarding_delay=forwarding_delay,
    )
