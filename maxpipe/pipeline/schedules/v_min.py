"""V-Min: split backward, a third of 1F1B's memory."""

from maxpipe.pipeline.schedules import SCHEDULES
from maxpipe.pipeline.schedules._table import Table
from maxpipe.pipeline.schedules._v_shape import VSchedule, repeated_block


@SCHEDULES.register()
class VMin(VSchedule):
    """Pipeline parallelism with controllable memory, Qi et al., arXiv:2405.15362; two chunks per stage in V placement.

    With F, I and W of a chunk all equal and M >= 2S

        bubble     4(S-1)F - F, two thirds of 1F1B's; 4(S-1)F + F where 3 divides S
        in flight  2 * ceil((S+2) / 3) chunks: a third of 1F1B's and up to two chunks
    """

    @classmethod
    def _table(cls, num_stages: int, num_microbatches: int) -> Table:
        in_flight = 2 * -(-(num_stages + 2) // 3)
        return repeated_block(cls.name(), num_stages, num_microbatches, (1, 1, 1, 1), in_flight)
