"""The circular pipeline and GPipe: all forwards, then all backwards, breadth first over chunks."""

import numpy as np

from maxpipe.pipeline.schedules.table import Table, from_ticks


def circular(
    num_stages: int, num_microbatches: int, num_repeats: int, forwarding_delay: int = 1
) -> Table:
    """Build the circular pipeline: all microbatches through one chunk of every stage, then through the next.

    Stage s runs microbatch m of chunk c at tick c*max(M, d*S) + m + d*s, with d the forwarding
    delay; the backward mirrors the forward in time, as differentiating the loop does. From MaxText
    and Praxis; called looped breadth-first by Lamy-Poirier, arXiv:2211.05953. For M >= d*S

        ticks      M*V + d(S-1) forward, the same backward
        bubble     d(S-1) / (M*V + d(S-1)) of the time
        in flight  M*V on every stage
    """
    return _breadth_first("circular", num_stages, num_microbatches, num_repeats, forwarding_delay)


def gpipe(num_stages: int, num_microbatches: int, forwarding_delay: int = 1) -> Table:
    """Build GPipe, the circular pipeline with one chunk per stage; Huang et al., arXiv:1811.06965.

    ticks      M + d(S-1) forward, the same backward
    bubble     d(S-1) / (M + d(S-1)) of the time
    in flight  M on every stage
    """
    return _breadth_first("gpipe", num_stages, num_microbatches, 1, forwarding_delay)


def _breadth_first(
    name: str, num_stages: int, num_microbatches: int, num_repeats: int, forwarding_delay: int
) -> Table:
    repeat, stage = np.divmod(np.arange(num_repeats * num_stages), num_stages)
    stride = max(num_microbatches, forwarding_delay * num_stages)
    # [M, 1] + [V*S] -> [M, V*S]
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
