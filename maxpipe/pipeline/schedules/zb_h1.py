"""ZB-H1: split backward; the memory of 1F1B's first stage."""

from maxpipe.pipeline.schedules import SCHEDULES
from maxpipe.pipeline.schedules._order import place, split_backward
from maxpipe.pipeline.schedules._schedule import Schedule
from maxpipe.pipeline.schedules._table import Table


@SCHEDULES.register()
class ZBH1(Schedule):
    """Zero bubble, handcrafted schedule 1; Qi et al., arXiv:2401.10241 (whose B is our I).

    Stage s runs S-s forwards, then I and F in turn, and its W are s behind its I: that fills the tail of 1F1B
    with W.

        bubble     (S-1)(F + I - W) for M >= S and W <= F
        in flight  min(M, S) on every stage, counted until W has run
    """

    engines = ("mpmd",)

    @classmethod
    def _build(
        cls, num_stages: int, num_microbatches: int, num_repeats: int, forwarding_delay: int, slack: int
    ) -> Table:
        orders = [split_backward(s, num_microbatches, num_stages - s, s) for s in range(num_stages)]
        return place(cls.name(), num_stages, num_microbatches, 1, orders)
