"""Interleaved 1F1B: several chunks per stage, depth first in groups of microbatches."""

import numpy as np

from maxpipe.pipeline.schedules import SCHEDULES
from maxpipe.pipeline.schedules._groups import depth_first, group_microbatches
from maxpipe.pipeline.schedules._order import one_forward_one_backward, place
from maxpipe.pipeline.schedules._schedule import Schedule
from maxpipe.pipeline.schedules._table import Table


@SCHEDULES.register()
class Interleaved1F1B(Schedule):
    """Narayanan et al., arXiv:2104.04473.

    Microbatches walk through the chunks in groups of S; stage s runs 2(S-1-s) + (V-1)S forwards, then
    forwards and backwards in turn. With F and B the time of one chunk and M a multiple of S

        bubble     (S-1)(F + B): (S-1) / (V*M) of the ideal time
        in flight  min(V*M, (V+1)S - 1 - 2s) chunks on stage s

    A remainder of M is spread over the groups; where they grow by r, the peak grows by (V-1)r. One chunk per
    stage makes it `eager_1f1b`.
    """

    engines = ("mpmd",)
    fixed_repeats = None

    @classmethod
    def _build(
        cls, num_stages: int, num_microbatches: int, num_repeats: int, forwarding_delay: int, slack: int
    ) -> Table:
        sizes = group_microbatches(num_microbatches, num_stages)
        order = np.argsort(depth_first(sizes, sizes, num_repeats), axis=None)
        walk = [divmod(int(unit), num_repeats) for unit in order]
        warmup = (num_repeats - 1) * int(sizes.max())
        orders = [
            one_forward_one_backward(
                [("F", m, c * num_stages + s) for m, c in walk],
                [("B", m, (num_repeats - 1 - c) * num_stages + s) for m, c in walk],
                2 * (num_stages - 1 - s) + warmup,
            )
            for s in range(num_stages)
        ]
        return place(cls.name(), num_stages, num_microbatches, num_repeats, orders)
