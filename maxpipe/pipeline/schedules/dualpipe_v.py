"""DualPipeV: pairs of forward and backward from both ends of a V, whose transfers hide behind each other."""

from collections.abc import Iterator

from maxpipe.pipeline.schedules import SCHEDULES
from maxpipe.pipeline.schedules._order import RawUnit
from maxpipe.pipeline.schedules._table import Table
from maxpipe.pipeline.schedules._v_shape import VSchedule, without_missing


@SCHEDULES.register()
class DualPipeV(VSchedule):
    """DeepSeek's DualPipe (arXiv:2412.19437) cut in half, after Sea AI Lab; two chunks per stage in V placement.

    Backwards are whole in the steady state and split at the ends. With M >= 2S, times of a chunk, and F and B of a
    pair one after the other

        bubble     at most (S-1)(F + 2B - 3W), the published (PP/2 - 1)(F&B + B - 3W) with PP = 2S
        in flight  2S + 1 chunks on every stage

    With fewer microbatches the order is that of 2S without the ones that are missing.
    """

    @classmethod
    def _table(cls, num_stages: int, num_microbatches: int) -> Table:
        return without_missing(cls.name(), _order, num_stages, num_microbatches, 2 * num_stages)


def _order(stage: int, num_stages: int, num_microbatches: int) -> Iterator[RawUnit]:
    """One stage's units; a letter is a kind of unit, small for the stage's second chunk, and W the oldest one due."""
    behind, near = num_stages - 1 - stage, stage + 1
    warmup = "F" * (2 * behind) + "Ff" * near + "iWf" * behind
    steady = "FbfB" * (num_microbatches - 2 * num_stages + near)
    drain = "bfB" * behind
    # The last half of the backwards is split, so that the stages in front get their gradients early.
    ends = "bB" * near
    cooldown = ends[:near] + ends[near:].replace("b", "i").replace("B", "I") + "WI" * behind + "W" * near
    counters = dict.fromkeys("FfBb", 0)
    due: list[tuple[int, int]] = []
    for letter in warmup + steady + drain + cooldown:
        kind = letter.upper()
        if kind == "W":
            yield kind, *due.pop(0)
            continue
        counter = {"i": "b", "I": "B"}.get(letter, letter)
        unit = counters[counter], stage if letter.isupper() else 2 * num_stages - 1 - stage
        counters[counter] += 1
        if kind == "I":
            due.append(unit)
        yield kind, *unit
