"""Eager 1F1B: 1F1B with twice the forwards up front, so that transfers are off the critical path."""

from maxpipe.pipeline.schedules import SCHEDULES
from maxpipe.pipeline.schedules._order import one_forward_one_backward, place
from maxpipe.pipeline.schedules._schedule import Schedule
from maxpipe.pipeline.schedules._table import Table


@SCHEDULES.register()
class Eager1F1B(Schedule):
    """Zhuang et al., arXiv:2211.05322; Alpa's `1f1b_overlap_friendly`.

    Stage s runs 2(S-1-s) forwards, then forwards and backwards in turn: in the steady state every activation
    and gradient arrives one unit before it is used, so a transfer no longer than a unit costs nothing.

        bubble     (S-1)(F + B), as 1F1B, when communication is free
        in flight  min(M, 2(S - s) - 1) on stage s
    """

    engines = ("mpmd",)

    @classmethod
    def _build(
        cls, num_stages: int, num_microbatches: int, num_repeats: int, forwarding_delay: int, slack: int
    ) -> Table:
        orders = [
            one_forward_one_backward(
                [("F", m, stage) for m in range(num_microbatches)],
                [("B", m, stage) for m in range(num_microbatches)],
                2 * (num_stages - 1 - stage),
            )
            for stage in range(num_stages)
        ]
        return place(cls.name(), num_stages, num_microbatches, 1, orders)
