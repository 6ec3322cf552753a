"""Build 1F1B, eager 1F1B and interleaved 1F1B: a few forwards, then forward and backward in turn.

Tables are free-running: a stage starts the next unit of its order once the unit's input has
arrived. Letters: S stages, M microbatches, V repeats; F and B the time of a forward and a backward
of one chunk.
"""

from maxpipe.pipeline.schedules.order import orders_1f1b, place
from maxpipe.pipeline.schedules.table import Table


def one_f_one_b(num_stages: int, num_microbatches: int) -> Table:
    """Build 1F1B: a stage runs a backward as soon as it can, so few microbatches are in flight.

    PipeDream-Flush, Narayanan et al., arXiv:2006.09503; Megatron-LM's schedule without
    interleaving. Stage s runs S-1-s forwards, then one forward and one backward in turn.

        bubble     (S-1)(F + B), as GPipe
        in flight  min(M, S - s) on stage s

    An example with S=3, M=4. Stage 0 starts F3 only after B0 has freed a place:

        tick    0  1  2  3  4  5  6  7  8  9  10 11
        stage 0 F0 F1 F2       B0 F3 B1    B2    B3
        stage 1    F0 F1    B0 F2 B1 F3 B2    B3
        stage 2       F0 B0 F1 B1 F2 B2 F3 B3
    """
    orders = orders_1f1b(num_stages, num_microbatches, 1, backward="B", lead=1)
    return place("1f1b", num_stages, num_microbatches, 1, orders)


def eager_1f1b(num_stages: int, num_microbatches: int) -> Table:
    """Build 1F1B with twice as many forwards at first, so that no unit waits for a transfer.

    Zhuang et al., arXiv:2211.05322; Alpa's `1f1b_overlap_friendly`. Stage s runs 2(S-1-s) forwards,
    then one forward and one backward in turn. In the steady state every activation and gradient
    arrives one unit before it is used, so a transfer no longer than a unit costs nothing.

        bubble     (S-1)(F + B), as 1F1B, when communication is free
        in flight  min(M, 2(S - s) - 1) on stage s

    An example with S=3, M=4. Stage 1 runs F2 in tick 3 (1F1B in tick 5) and stage 2 in tick
    6, so that the transfer has time:

        tick    0  1  2  3  4  5  6  7  8  9  10 11
        stage 0 F0 F1 F2 F3    B0    B1    B2    B3
        stage 1    F0 F1 F2 B0 F3 B1    B2    B3
        stage 2       F0 B0 F1 B1 F2 B2 F3 B3
    """
    orders = orders_1f1b(num_stages, num_microbatches, 1, backward="B", lead=2)
    return place("eager_1f1b", num_stages, num_microbatches, 1, orders)


def interleaved_1f1b(num_stages: int, num_microbatches: int, num_repeats: int) -> Table:
    """Build 1F1B with several chunks per stage, depth first in groups of microbatches.

    Narayanan et al., arXiv:2104.04473. Microbatches pass the chunks in groups of S: a group passes
    all chunks of a stage before the next group starts. Stage s runs 2(S-1-s) + (V-1)S forwards,
    then one forward and one backward in turn. With M a multiple of S

        bubble     (S-1)(F + B): (S-1) / (V*M) of the ideal time
        in flight  min(V*M, (V+1)S - 1 - 2s) chunks on stage s

    A remainder of M is spread over the groups; where they grow by r, the peak grows by (V-1)r. One
    chunk per stage makes it `eager_1f1b`.

    An example with S=2, M=4, V=2. The groups are microbatches 0-1 and 2-3:

        tick    0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17
        stage 0 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3
        stage 1     1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """
    orders = orders_1f1b(num_stages, num_microbatches, num_repeats, backward="B", lead=2)
    return place("interleaved_1f1b", num_stages, num_microbatches, num_repeats, orders)
