"""ZB-V: split backward and V placement; no bubble in the memory of 1F1B."""

from collections.abc import Iterator
from itertools import count

from maxpipe.pipeline.schedules import SCHEDULES
from maxpipe.pipeline.schedules._order import RawUnit
from maxpipe.pipeline.schedules._table import Table
from maxpipe.pipeline.schedules._v_shape import VSchedule, without_missing


@SCHEDULES.register()
class ZBV(VSchedule):
    """Zero bubble, V schedule; Qi et al., arXiv:2401.10241 section 6; two chunks per stage in V placement.

    With F, I and W of a chunk all equal and M >= 2S - 1

        bubble     0, within each stage's own span
        in flight  2S chunks on every stage, the memory of 1F1B's first stage

    With fewer microbatches the order is that of 2S - 1 without the ones that are missing.
    """

    @classmethod
    def _table(cls, num_stages: int, num_microbatches: int) -> Table:
        return without_missing(cls.name(), _order, num_stages, num_microbatches, 2 * num_stages - 1)


def _order(stage: int, num_stages: int, num_microbatches: int) -> Iterator[RawUnit]:
    """One stage's units; a letter is a kind of unit, small for the stage's second chunk."""
    ahead, behind = stage, num_stages - stage
    warmup = "F" * (2 * behind - 1) + "fF" * ahead + "fiw" * behind
    num_started = 2 * behind - 1 + ahead
    steady = "FIWfiw" * (num_microbatches - num_started)
    # The second chunk's forwards that are left, and what they make possible.
    drain = "IWfiw" * (num_started - num_stages)
    cooldown = "Ii" * ahead + "IW" * behind + "w" * ahead + "W" * ahead
    counters = {letter: count() for letter in "FfIiWw"}
    for letter in warmup + steady + drain + cooldown:
        chunk = stage if letter.isupper() else 2 * num_stages - 1 - stage
        yield letter.upper(), next(counters[letter]), chunk
