"""1F1B, eager 1F1B and interleaved 1F1B: free-running tables that start a unit once its input has arrived.

Letters: S stages, M microbatches, V repeats; F and B the time of a forward and a backward of one
chunk.
"""

import numpy as np

from maxpipe.pipeline.schedules.order import (
    depth_first,
    group_microbatches,
    one_forward_one_backward,
    place,
)
from maxpipe.pipeline.schedules.table import Table


def one_f_one_b(num_stages: int, num_microbatches: int) -> Table:
    """Build 1F1B: each stage runs a backward as soon as it can, so that few microbatches are in flight.

    PipeDream-Flush, Narayanan et al., arXiv:2006.09503; Megatron-LM's schedule without
    interleaving. Stage s runs S-1-s forwards, then one forward and one backward in turn.

        bubble     (S-1)(F + B), as GPipe
        in flight  min(M, S - s) on stage s
    """
    warmups = [num_stages - 1 - stage for stage in range(num_stages)]
    return _one_chunk("1f1b", num_microbatches, warmups)


def eager_1f1b(num_stages: int, num_microbatches: int) -> Table:
    """Build 1F1B with twice the forwards up front, so that transfers are off the critical path.

    Zhuang et al., arXiv:2211.05322; Alpa's `1f1b_overlap_friendly`. Stage s runs 2(S-1-s) forwards,
    then one forward and one backward in turn. In the steady state every activation and gradient
    arrives one unit before it is used, so a transfer no longer than a unit costs nothing.

        bubble     (S-1)(F + B), as 1F1B, when communication is free
        in flight  min(M, 2(S - s) - 1) on stage s
    """
    warmups = [2 * (num_stages - 1 - stage) for stage in range(num_stages)]
    return _one_chunk("eager_1f1b", num_microbatches, warmups)


def interleaved_1f1b(num_stages: int, num_microbatches: int, num_repeats: int) -> Table:
    """Build 1F1B with several chunks per stage, depth first in groups of microbatches.

    Narayanan et al., arXiv:2104.04473. Microbatches walk through the chunks in groups of S; stage s
    runs 2(S-1-s) + (V-1)S forwards, then one forward and one backward in turn. With M a multiple of
    S

        bubble     (S-1)(F + B): (S-1) / (V*M) of the ideal time
        in flight  min(V*M, (V+1)S - 1 - 2s) chunks on stage s

    A remainder of M is spread over the groups; where they grow by r, the peak grows by (V-1)r. One
    chunk per stage makes it `eager_1f1b`.
    """
    sizes = group_microbatches(num_microbatches, num_stages)
    order = np.argsort(depth_first(sizes, sizes, num_repeats), axis=None)
    walk = [
        divmod(int(unit), num_repeats) for unit in order
    ]  # (microbatch, chunk), chunks ascending
    warmup = (num_repeats - 1) * int(sizes.max())
    orders = [
        one_forward_one_backward(
            [("F", m, c * num_stages + stage) for m, c in walk],
            [("B", m, (num_repeats - 1 - c) * num_stages + stage) for m, c in walk],
            2 * (num_stages - 1 - stage) + warmup,
        )
        for stage in range(num_stages)
    ]
    return place("interleaved_1f1b", num_stages, num_microbatches, num_repeats, orders)


def _one_chunk(name: str, num_microbatches: int, warmups: list[int]) -> Table:
    """Build the table of one chunk per stage from the forwards that each stage runs before its first backward."""
    orders = [
        one_forward_one_backward(
            [("F", m, stage) for m in range(num_microbatches)],
            [("B", m, stage) for m in range(num_microbatches)],
            warmup,
        )
        for stage, warmup in enumerate(warmups)
    ]
    return place(name, len(warmups), num_microbatches, 1, orders)
