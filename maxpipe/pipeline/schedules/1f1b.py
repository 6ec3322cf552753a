"""1F1B: each stage runs a backward as soon as it can, so that few microbatches are in flight."""

from maxpipe.pipeline.schedules import SCHEDULES
from maxpipe.pipeline.schedules._order import one_forward_one_backward, place
from maxpipe.pipeline.schedules._schedule import Schedule
from maxpipe.pipeline.schedules._table import Table


@SCHEDULES.register()
class OneFOneB(Schedule):
    """PipeDream-Flush, Narayanan et al., arXiv:2006.09503; Megatron-LM's schedule without interleaving.

    Stage s runs S-1-s forwards, then forwards and backwards in turn.

        bubble     (S-1)(F + B), as GPipe
        in flight  min(M, S - s) on stage s
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
                num_stages - 1 - stage,
            )
            for stage in range(num_stages)
        ]
        return place(cls.name(), num_stages, num_microbatches, 1, orders)
