"""GPipe: all forwards, then all backwards."""

from maxpipe.pipeline.schedules import SCHEDULES
from maxpipe.pipeline.schedules._schedule import Schedule
from maxpipe.pipeline.schedules._table import Table
from maxpipe.pipeline.schedules.circular import breadth_first


@SCHEDULES.register()
class GPipe(Schedule):
    """Huang et al., arXiv:1811.06965: the circular pipeline with one chunk per stage.

    ticks      M + d(S-1) forward, the same backward
    bubble     d(S-1) / (M + d(S-1)) of the time
    in flight  M on every stage
    """

    engines = ("circular", "mpmd")
    delayable = True

    @classmethod
    def _build(
        cls, num_stages: int, num_microbatches: int, num_repeats: int, forwarding_delay: int, slack: int
    ) -> Table:
        return breadth_first(cls.name(), num_stages, num_microbatches, num_repeats, forwarding_delay)
