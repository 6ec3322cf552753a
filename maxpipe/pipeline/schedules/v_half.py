"""V-Half: split backward, half of 1F1B's memory, half of its bubble."""

from maxpipe.pipeline.schedules import SCHEDULES
from maxpipe.pipeline.schedules._table import Table
from maxpipe.pipeline.schedules._v_shape import VSchedule, repeated_block


@SCHEDULES.register()
class VHalf(VSchedule):
    """Pipeline parallelism with controllable memory, Qi et al., arXiv:2405.15362; two chunks per stage in V placement.

    With F, I and W of a chunk all equal and M >= 2S

        bubble     at most 3(S-1)F, half of 1F1B's
        in flight  S + 1 chunks for odd S, S + 2 for even: half of 1F1B's and one microbatch
    """

    @classmethod
    def _table(cls, num_stages: int, num_microbatches: int) -> Table:
        in_flight = num_stages + (1 if num_stages % 2 else 2)
        return repeated_block(cls.name(), num_stages, num_microbatches, (2, 1, 2, 1), in_flight)
