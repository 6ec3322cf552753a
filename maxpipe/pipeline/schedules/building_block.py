"""Build V-Half and V-Min: a block, repeated for every microbatch and squeezed.

The building block (Qi et al., arXiv:2405.15362) says when one microbatch passes each stage: F down
through the first chunks, F back through the second ones, I down again, and I back. Chunks are in V
placement, s and 2S-1-s on stage s. Blocks follow each other every six units of time, in which a
stage runs two F, two I and two W; so the time from a chunk's F to the end of its backward, divided
by six, is the number of microbatches in flight there. Squeezing closes gaps at the start and the
end of a step: it runs F and I earlier as long as no more chunks are in flight than allowed.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from maxpipe.pipeline.schedules.adapt import fill
from maxpipe.pipeline.schedules.order import RawUnit, place
from maxpipe.pipeline.schedules.table import Table
from maxpipe.pipeline.schedules.timed_orders import UnitTimes, Workload

PERIOD = 6  # units of time from a building block to the next
# The four passes of a microbatch over the stages: kind, and 1 if it runs from the last stage back.
PASSES = (("F", 0), ("F", 1), ("I", 0), ("I", 1))


def v_half(num_stages: int, num_microbatches: int) -> Table:
    """Build V-Half: half of 1F1B's memory, half of its bubble; Qi et al., arXiv:2405.15362.

    With F, I and W of a chunk all equal and M >= 2S

        bubble     (3S - 4)F for odd S, (3S - 7)F for even S > 2: less than half of 1F1B's 6(S-1)F
        in flight  S + 1 chunks for odd S, S + 2 for even: half of 1F1B's plus one microbatch

    An example with S=2, M=3, V=2:

        tick    0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18
        stage 0 0F0 0F1     3F0 3I0 3F1 3W0 0F2 0I0 3I1 0W0 3F2 3I2 0I1 3W1 0I2 3W2 0W1 0W2
        stage 1     1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """
    in_flight = num_stages + (1 if num_stages % 2 else 2)
    return _repeated_block("v_half", num_stages, num_microbatches, (2, 1, 2, 1), in_flight)


def v_min(num_stages: int, num_microbatches: int) -> Table:
    """Build V-Min: a third of 1F1B's memory; Qi et al., arXiv:2405.15362.

    With F, I and W of a chunk all equal and M >= 2S

        bubble     (4S - 5)F, or (4S - 7)F where 3 divides S: two thirds of 1F1B's 6(S-1)F
        in flight  2 * ceil((S+2) / 3) chunks: a third of 1F1B's plus up to two chunks

    An example with S=2, M=3, V=2:

        tick    0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18  19  20
        stage 0 0F0 0F1 0F2 3F0 3I0 3W0     0I0 0W0 3F1 3I1 3W1     0I1 0W1 3F2 3I2 3W2     0I2 0W2
        stage 1     1F0 2F0         2I0 1I0 1F1 2F1 2W0 1F2 2I1 1I1 1W0 2F2 2W1 1W1 2I2 1I2 2W2 1W2
    """
    in_flight = 2 * -(-(num_stages + 2) // 3)
    return _repeated_block("v_min", num_stages, num_microbatches, (1, 1, 1, 1), in_flight)


def _repeated_block(
    name: str, num_stages: int, num_microbatches: int, hops: Sequence[int], max_in_flight: int
) -> Table:
    """Build the table of a building block; `hops` are times to the next stage, in each of `PASSES`.

    The block gives each stage the order of its F and I. A W runs when its stage would be idle, or
    has `max_in_flight` chunks in flight.
    """
    # 1. Repeat the shortest block that fits the memory, one per microbatch.
    for starts in _blocks(num_stages, hops):
        rows = [
            _Row(stage, num_stages, num_microbatches, [start[stage] for start in starts])
            for stage in range(num_stages)
        ]
        if all(row.peak() <= max_in_flight for row in rows):
            break
    else:
        raise AssertionError(f"no building block with hops {hops} for {num_stages} stages")
    # 2. Close the gaps at the ends.
    _squeeze(rows, max_in_flight)
    # 3. Put each W where its stage would idle if all units took equally long.
    unit = (1.0,) * (2 * num_stages)
    times = UnitTimes(unit, unit, unit, unit)
    workload = Workload(num_stages, num_microbatches, 2, "v", times, max_in_flight)
    queues = workload.orders(row.order() for row in rows)
    orders = workload.raw(fill(workload, queues, patience=0.0, level=False))
    return place(name, num_stages, num_microbatches, 2, orders, placement="v")


def _blocks(num_stages: int, hops: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield blocks: the start of each pass of the first microbatch on each stage, [4][S].

    Between passes the microbatch waits, so that on every stage the four starts differ modulo the
    period: no two units of the repeated block then collide. The shortest blocks come first.
    """
    down = range(num_stages)
    for waits in sorted(product(range(PERIOD), repeat=3), key=sum):
        starts: list[list[int]] = []
        begin = 0
        for hop, (_, back), wait in zip(hops, PASSES, (*waits, 0), strict=True):
            starts.append([begin + hop * (num_stages - 1 - s if back else s) for s in down])
            begin = max(starts[-1]) + 1 + wait
        if all(len({start[s] % PERIOD for start in starts}) == len(PASSES) for s in down):
            yield starts


class _Row:
    """One stage's F and I by tick, with W in the ticks between them; a unit takes one tick.

    Int [ticks] `ahead` is 1 where an F runs, `backward` where an I does.
    """

    def __init__(
        self, stage: int, num_stages: int, num_microbatches: int, starts: Sequence[int]
    ) -> None:
        chunks = stage, 2 * num_stages - 1 - stage
        self.tick: dict[RawUnit, int] = {}
        for start, (kind, back) in zip(starts, PASSES, strict=True):
            chunk = chunks[back if kind == "F" else 1 - back]  # I passes the second chunks first
            for microbatch in range(num_microbatches):
                self.tick[kind, microbatch, chunk] = start + PERIOD * microbatch
        num_ticks = 1 + max(self.tick.values())
        self.ahead, self.backward = np.zeros(num_ticks, int), np.zeros(num_ticks, int)
        for (kind, _, _), tick in self.tick.items():
            (self.ahead if kind == "F" else self.backward)[tick] = 1

    def due(self) -> np.ndarray:
        """Return int [ticks]: how many W are due at the end of each tick, if they run at once."""
        free = 1 - self.ahead - self.backward
        balance = np.cumsum(self.backward - free)
        return balance - np.minimum(np.minimum.accumulate(balance), 0)

    def peak(self) -> int:
        return int(np.max(np.cumsum(self.ahead - self.backward) + self.due()))

    def move(self, unit: RawUnit, tick: int) -> None:
        runs = self.ahead if unit[0] == "F" else self.backward
        runs[self.tick[unit]] = 0
        runs[tick] = 1
        self.tick[unit] = tick

    def order(self) -> list[RawUnit]:
        return sorted(self.tick, key=self.tick.__getitem__)


def _squeeze(rows: Sequence[_Row], max_in_flight: int) -> None:
    """Move F and I at the ends to the first free tick that their inputs and the memory allow.

    Between the first I and the last F of the first chunk, blocks keep their period: if F, I and
    W are not equally long, an order that is squeezed there loses time in every period.
    """
    last = 2 * len(rows) - 1
    first_tick = rows[0].tick
    start = first_tick["I", 0, 0]
    stop = max(tick for (kind, _, chunk), tick in first_tick.items() if (kind, chunk) == ("F", 0))
    row_of = {unit: row for row in rows for unit in row.tick}
    for unit in sorted(row_of, key=lambda unit: row_of[unit].tick[unit]):
        row = row_of[unit]
        now = row.tick[unit]
        if start <= now < stop:
            continue
        kind, microbatch, chunk = unit
        # In each pass the microbatches keep their order.
        needs: list[RawUnit] = [(kind, microbatch - 1, chunk)]
        if kind == "F":
            needs.append(("F", microbatch, chunk - 1))
        else:
            needs.append(("F", microbatch, last) if chunk == last else ("I", microbatch, chunk + 1))
        first = 1 + max((row_of[u].tick[u] for u in needs if u in row_of), default=-1)
        # Try earlier ticks in turn; a move that exceeds the memory is taken back.
        for tick in range(first, now):
            if row.ahead[tick] or row.backward[tick]:
                continue
            row.move(unit, tick)
            if row.peak() <= max_in_flight:
                break
            row.move(unit, now)
