"""Build the circular pipeline and GPipe: all forwards, then all backwards, chunk by chunk.

Letters: S stages, M microbatches, V repeats, d forwarding delay. Ticks are lockstep. The backward
mirrors the forward in time, as differentiating the forward loop does.
"""

import numpy as np

from maxpipe.pipeline.schedules.table import Table, from_ticks


def circular(
    num_stages: int, num_microbatches: int, num_repeats: int, forwarding_delay: int = 1
) -> Table:
    """Build the circular pipeline: all microbatches pass one chunk of every stage, then the next.

    Stage s runs microbatch m of chunk c at tick c*max(M, d*S) + m + d*s. From MaxText and Praxis;
    called looped breadth-first by Lamy-Poirier, arXiv:2211.05953. For M >= d*S

        ticks      M*V + d(S-1) forward, the same backward
        bubble     d(S-1) / (M*V + d(S-1)) of the time
        in flight  M*V on every stage

    An example with S=2, M=3, V=2. Stage 0 starts chunk 2 when all microbatches have passed its
    chunk 0; microbatch 0 is back from stage 1 in tick 2 and waits one tick:

        tick    0   1   2   3   4   5   6   7   8   9   10  11  12  13
        stage 0 0F0 0F1 0F2 2F0 2F1 2F2         2B2 2B1 2B0 0B2 0B1 0B0
        stage 1     1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0
    """
    return _breadth_first("circular", num_stages, num_microbatches, num_repeats, forwarding_delay)


def gpipe(num_stages: int, num_microbatches: int, forwarding_delay: int = 1) -> Table:
    """Build GPipe, the circular pipeline with one chunk per stage; Huang et al., arXiv:1811.06965.

        ticks      M + d(S-1) forward, the same backward
        bubble     d(S-1) / (M + d(S-1)) of the time
        in flight  M on every stage

    An example with S=2, M=3:

        tick    0  1  2  3  4  5  6  7
        stage 0 F0 F1 F2       B2 B1 B0
        stage 1    F0 F1 F2 B2 B1 B0
    """
    return _breadth_first("gpipe", num_stages, num_microbatches, 1, forwarding_delay)


def _breadth_first(
    name: str, num_stages: int, num_microbatches: int, num_repeats: int, forwarding_delay: int
) -> Table:
    repeat, stage = np.divmod(np.arange(num_repeats * num_stages), num_stages)  # [V*S] each
    # A chunk of all microbatches takes M ticks, or a microbatch's way around the ring if longer.
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
