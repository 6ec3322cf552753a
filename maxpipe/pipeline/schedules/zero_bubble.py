"""Build ZB-H1, also interleaved, and ZB-H2: backwards split into I and W; W fills the bubble.

Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, whose B is our I. Only I is on the
critical path: the stage before waits for it, while W can run at any later time. Letters: S stages,
M microbatches, V repeats; F, I and W the time of a unit. Tables are free-running.
"""

import math
from itertools import starmap

from maxpipe.pipeline.schedules.adapt import adapt
from maxpipe.pipeline.schedules.order import (
    RawUnit,
    one_forward_one_backward,
    orders_1f1b,
    place,
    with_weight_gradients,
)
from maxpipe.pipeline.schedules.table import Table
from maxpipe.pipeline.schedules.timed_orders import UnitTimes


def zb_h1(num_stages: int, num_microbatches: int) -> Table:
    """Build ZB-H1: a third of 1F1B's bubble (if F = I = W) in the memory of 1F1B's first stage.

    Stage s runs S-s forwards, then I and F in turn, and runs each W s units after its I, which
    fills the end of 1F1B with W.

        idle       (S-1)(F + I - W) for M >= S and W <= F, in the longest span of a stage
        in flight  min(M, S) on every stage, counted until W has run

    An example with S=3, M=4. Stage 2 puts off W0 until I2 has run, so that stage 1 gets its
    gradients early; its last W run at the end, where 1F1B idles:

        tick    0  1  2  3  4  5  6  7  8  9  10 11 12 13
        stage 0 F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
        stage 1    F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        stage 2       F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return _split_1f1b("zb_h1", num_stages, num_microbatches, 1, lead=1)


def interleaved_zb(num_stages: int, num_microbatches: int, num_repeats: int) -> Table:
    """Build ZB-H1 with several chunks per stage; torch's `ScheduleInterleavedZeroBubble`.

    Microbatches pass the chunks in the groups of `interleaved_1f1b`. Stage s runs
    S-1-s + (V-1)S forwards, then F and I in turn, and runs each W s units after its I. With M a
    multiple of S, and F, I and W of a chunk all equal

        bubble     (S-1)F: a third of interleaved_1f1b's
        in flight  min(V*M, V*S) chunks on every stage, counted until W has run

    One chunk per stage makes it `zb_h1`. Other numbers of microbatches are as in
    `interleaved_1f1b`. An example with S=2, M=2, V=2:

        tick    0   1   2   3   4   5   6   7   8   9   10  11  12
        stage 0 0F0 0F1 2F0 2F1     2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        stage 1     1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    return _split_1f1b("interleaved_zb", num_stages, num_microbatches, num_repeats, lead=1)


def _split_1f1b(
    name: str, num_stages: int, num_microbatches: int, num_repeats: int, lead: int
) -> Table:
    rows = orders_1f1b(num_stages, num_microbatches, num_repeats, backward="I", lead=lead)
    # The later the stage, the later its W: early stages need its I first.
    orders = [with_weight_gradients(row, lag=lead * stage) for stage, row in enumerate(rows)]
    return place(name, num_stages, num_microbatches, num_repeats, orders)


def zb_h2(num_stages: int, num_microbatches: int, times: UnitTimes | None = None) -> Table:
    """Build ZB-H2: twice the memory of 1F1B, almost no wait within a stage's span.

    Stage s runs 2(S-s) - 1 forwards, then I and F in turn, and runs each W 2s units after its I.

        idle       (S-1)(F + I - 2W) for M >= 2S-1, W <= F and 2W <= F + I, within each stage's own
                   span
        in flight  min(M, 2S - 1) on every stage, counted until W has run

    The spans of the stages are shifted against each other. A synchronous optimizer waits for the
    last stage; the whole gain needs one that lets the first stages start their next step earlier
    (section 4 of the paper).

    With `times` the order is adapted to them, with up to 2S in flight, as the paper's ZB-2p: stages
    run as many forwards at first as fit into the time until their first gradient arrives.

    An example with S=3, M=5. No stage idles between its first and its last unit:

        tick    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16
        stage 0 F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
        stage 1    F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
        stage 2       F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    # Enough forwards to fill the time until the first gradient comes back.
    table = _split_1f1b("zb_h2", num_stages, num_microbatches, 1, lead=2)
    if times is None:
        return table
    most = 2 * num_stages

    def forwards_first(stage: int, count: int) -> list[RawUnit]:
        forward, backward = ([(k, m, stage) for m in range(num_microbatches)] for k in "FI")
        # The last of these forwards is followed by the first I.
        return list(one_forward_one_backward(forward, backward, count - 1))

    others = [
        list(starmap(forwards_first, enumerate(_warmups(times, most, is_eager))))
        for is_eager in (False, True)
    ]
    return adapt(table, times, most, others)


def _warmups(times: UnitTimes, max_in_flight: int, is_eager: bool) -> list[int]:
    """Return how many forwards each stage runs before its first I, never fewer than the next stage.

    Args:
      times: times of the units of each stage.
      max_in_flight: chunks in flight on the first stage; each stage after it has one less.
      is_eager: whether the last of these forwards may delay the first I.
    """
    counts: list[int] = []
    # From the start of the last stage's first F to its gradient; each turn adds a stage.
    gap = times.head
    for stage in reversed(range(len(times.forward))):
        forward = times.forward[stage]
        gap += forward
        fitting = gap / forward + 1e-9 if forward else math.inf
        most = max_in_flight - stage
        count = most if fitting >= most else int(fitting) + is_eager * (fitting % 1 > 1e-6)
        counts.append(max(count, 1 + counts[-1] if counts else 1))
        gap += times.input_gradient[stage] + 2 * times.communication
    return counts[::-1]
