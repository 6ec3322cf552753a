"""ZB-H2: split backward; twice the memory of 1F1B, almost no bubble."""

from maxpipe.pipeline.schedules import SCHEDULES
from maxpipe.pipeline.schedules._order import place, split_backward
from maxpipe.pipeline.schedules._schedule import Schedule
from maxpipe.pipeline.schedules._table import Table


@SCHEDULES.register()
class ZBH2(Schedule):
    """Zero bubble, handcrafted schedule 2; Qi et al., arXiv:2401.10241 (whose B is our I).

    Stage s runs 2(S-s) - 1 forwards, then I and F in turn, and its W are 2s behind its I.

        bubble     (S-1)(F + I - 2W) for M >= 2S-1, W <= F and 2W <= F + I, within each stage's own span
        in flight  min(M, 2S - 1) on every stage, counted until W has run
    """

    engines = ("mpmd",)

    @classmethod
    def _build(
        cls, num_stages: int, num_microbatches: int, num_repeats: int, forwarding_delay: int, slack: int
    ) -> Table:
        orders = [
            split_backward(stage, num_microbatches, 2 * (num_stages - stage) - 1, 2 * stage)
            for stage in range(num_stages)
        ]
        return place(cls.name(), num_stages, num_microbatches, 1, orders)
