"""Build ZB-V and DualPipeV: two chunks per stage in V placement, s and 2S-1-s on stage s.

Orders are written as strings: a letter is a kind of unit, lower case for the stage's second chunk.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import count

from maxpipe.pipeline.schedules.adapt import adapt
from maxpipe.pipeline.schedules.order import RawUnit, place
from maxpipe.pipeline.schedules.table import Table
from maxpipe.pipeline.schedules.timed_orders import UnitTimes


def zb_v(num_stages: int, num_microbatches: int, times: UnitTimes | None = None) -> Table:
    """Build ZB-V: no wait within a span, in 1F1B's memory; Qi et al., arXiv:2401.10241, section 6.

    With F, I and W of a chunk all equal and M >= 2S - 1

        idle       0, within each stage's own span
        in flight  2S chunks on every stage, the memory of 1F1B's first stage

    With fewer microbatches the order is the one for 2S - 1, without the missing ones. With `times`
    the order is adapted to them in the same memory. An example with S=2, M=3, V=2:

        tick    0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18
        stage 0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        stage 1     1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    table = _without_missing("zb_v", _zb_v_order, num_stages, num_microbatches, 2 * num_stages - 1)
    return adapt(table, times, max_in_flight=2 * num_stages) if times else table


def dualpipe_v(num_stages: int, num_microbatches: int) -> Table:
    """Build DualPipeV: a forward of one chunk is paired with a backward of the other.

    DeepSeek's DualPipe (arXiv:2412.19437) cut in half, after Sea AI Lab. The pairs are meant to
    overlap one unit's transfers with the other's work. Backwards are B in the steady state, and
    split into I and W at the ends. With M >= 2S, times of a chunk, and F and B of a pair one after
    the other

        bubble     at most (S-1)(F + 2B - 3W), the published (PP/2 - 1)(F&B + B - 3W) with PP = 2S
        in flight  2S + 1 chunks on every stage

    With fewer microbatches the order is the one for 2S, without the missing ones. An example with
    S=2, M=4, V=2:

        tick    0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18
        stage 0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
        stage 1     1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
    """
    return _without_missing(
        "dualpipe_v", _dualpipe_v_order, num_stages, num_microbatches, 2 * num_stages
    )


def _zb_v_order(stage: int, num_stages: int, num_microbatches: int) -> Iterator[RawUnit]:
    after = num_stages - stage  # stages from this one on
    # 1. Warm-up: forwards of the first chunk until the first microbatch comes back from the last
    # stage, then both chunks.
    warmup = "F" * (2 * after - 1) + "fF" * stage + "fiw" * after
    # 2. Steady state: F, I and W of both chunks in turn.
    num_started = 2 * after - 1 + stage
    steady = "FIWfiw" * (num_microbatches - num_started)
    # 3. Drain: the second chunk's remaining forwards, and the backwards that follow them.
    drain = "IWfiw" * (num_started - num_stages)
    # 4. Cool-down: input gradients first, since the stages before wait for them; W fill the gaps.
    cooldown = "Ii" * stage + "IW" * after + "w" * stage + "W" * stage
    counters = {letter: count() for letter in "FfIiWw"}
    for letter in warmup + steady + drain + cooldown:
        chunk = stage if letter.isupper() else 2 * num_stages - 1 - stage
        yield letter.upper(), next(counters[letter]), chunk


def _dualpipe_v_order(stage: int, num_stages: int, num_microbatches: int) -> Iterator[RawUnit]:
    """Yield one stage's units; a W belongs to the oldest I whose W has not run."""
    after = num_stages - 1 - stage  # stages after this one
    near = stage + 1
    # 1. Warm-up: forwards of the first chunk, then of both, then the first split backwards of the
    # second chunk.
    warmup = "F" * (2 * after) + "Ff" * near + "iWf" * after
    # 2. Steady state: pairs of a forward of one chunk and a backward of the other.
    steady = "FbfB" * (num_microbatches - 2 * num_stages + near)
    # 3. Drain: the second chunk's remaining forwards.
    drain = "bfB" * after
    # 4. Cool-down: the second half of the last backwards is split, so that the stages before get
    # their gradients early.
    ends = "bB" * near
    cooldown = (
        ends[:near] + ends[near:].replace("b", "i").replace("B", "I") + "WI" * after + "W" * near
    )
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


def _without_missing(
    name: str,
    order: Callable[[int, int, int], Iterable[RawUnit]],
    num_stages: int,
    num_microbatches: int,
    least: int,
) -> Table:
    """Build the table of an order that is defined for at least `least` microbatches.

    Args:
      order: (stage, number of stages, number of microbatches) -> the stage's units. With fewer than
        `least` microbatches it is the order for `least`, without the missing ones.
    """
    orders = [order(s, num_stages, max(num_microbatches, least)) for s in range(num_stages)]
    shortened = [(unit for unit in units if unit[1] < num_microbatches) for units in orders]
    return place(name, num_stages, num_microbatches, 2, shortened, placement="v")
