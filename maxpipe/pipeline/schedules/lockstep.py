"""Build tables for one SPMD program, in which all stages share a tick.

These are circular and GPipe, lockstep 1F1B and zero bubble, and lockstep tables under any cap of
memory. Letters: S stages, M microbatches, V repeats, d forwarding delay, N ticks; F, B, I and W the
time of a unit of one chunk.

Every tick has an F slot, then a B (or I) slot, then perhaps a W slot. The smallest example is
`lockstep_1f1b` with S=2, M=3, V=1, where the last stage runs the B of a microbatch in the tick of
its F:

    tick    0  1     2     3     4
    stage 0 F0 F1    F2+B0 B1    B2
    stage 1    F0+B0 F1+B1 F2+B2

What its buffers hold in each tick is shown at the top of
`maxpipe.pipeline.engines.scheduled.stage_program`.
"""

import numpy as np

from maxpipe.pipeline.schedules.order import depth_first, group_microbatches
from maxpipe.pipeline.schedules.table import Table, from_ticks, stages_of_chunks


def lockstep_1f1b(
    num_stages: int,
    num_microbatches: int,
    num_repeats: int,
    forwarding_delay: int = 1,
    slack: int = 0,
) -> Table:
    """Build lockstep interleaved 1F1B.

    Stage s runs its k-th F at tick k + d*s and its j-th B at tick j + D + d*(S-1-s). Here k counts
    units in the order (group of microbatches, chunk, microbatch), and j the same with chunks
    reversed; groups have at least d*S microbatches, and D is the tick in which the last stage can
    run its first B. Order, time and memory are those of Megatron's interleaved schedule (Narayanan
    et al., arXiv:2104.04473), but all stages run the same program.

    With groups of exactly d*S microbatches (M a multiple of d*S), D = d(V*S-1) + slack and

        time       (M*V + d(S-1)) (F + B), so a bubble of d(S-1) chunks of F + B
        in flight  d((V+1)S - 2 - 2s) + 1 + slack on stage s; (V+1)S - 1 - 2s for d = 1. This
                   does not depend on M.

    A remainder of M is spread over the groups, which costs no time; where groups grow by r, D and
    the peak grow by (V-1)r. Fewer than d*S microbatches leave positions empty.

    An example with S=2, M=2, V=2, where D = 3:

        tick    0   1   2   3       4       5   6   7
        stage 0 0F0 0F1 2F0 2F1     2B0     2B1 0B0 0B1
        stage 1     1F0 1F1 3F0+3B0 3F1+3B1 1B0 1B1
    """
    forward, backward = _ticks(num_stages, num_microbatches, num_repeats, forwarding_delay, slack)
    return from_ticks(
        "lockstep_1f1b",
        num_stages,
        num_repeats,
        {"F": forward, "B": backward},
        lockstep=True,
        forwarding_delay=forwarding_delay,
        slack=slack,
    )


def lockstep_zb(
    num_stages: int,
    num_microbatches: int,
    num_repeats: int,
    forwarding_delay: int = 1,
    slack: int = 0,
) -> Table:
    """Build lockstep 1F1B with split backwards: ticks have a third slot, for weight gradients.

    F and I run in the ticks of `lockstep_1f1b`'s F and B. The j-th W of every stage runs at tick
    j + D + d(S-1), when the first stage runs its j-th I; on stage s that is d*s ticks after the I.
    Ticks in which some stages cannot have an I then cost no W. The split is that of zero bubble
    (Qi et al., arXiv:2401.10241, whose B is our I), brought into lockstep. With M a multiple of d*S

        time       M*V (F + I + W) + d(S-1) (F + I): d(S-1) W less than lockstep_1f1b, if B = I + W
        bubble     d(S-1) chunks of F + I
        in flight  d((V+1)S - 2 - s) + 1 + slack on stage s, counted until W has run. The first
                   stage, which sets the size of the program's buffers, has as many as with
                   lockstep_1f1b.
        stash      d*s + 1 chunks between their I and their W on stage s. The program's buffers are
                   those of the last stage, d(S-1) + 1 on each.

    Other numbers of microbatches are as in `lockstep_1f1b`. An example with S=2, M=3:

        tick    0  1     2        3        4
        stage 0 F0 F1    F2+I0+W0 I1+W1    I2+W2
        stage 1    F0+I0 F1+I1+W0 F2+I2+W1 W2
    """
    forward, backward = _ticks(num_stages, num_microbatches, num_repeats, forwarding_delay, slack)
    stage = stages_of_chunks(num_stages, num_repeats, "loop")
    return from_ticks(
        "lockstep_zb",
        num_stages,
        num_repeats,
        {"F": forward, "I": backward, "W": backward + forwarding_delay * stage},
        lockstep=True,
        forwarding_delay=forwarding_delay,
        slack=slack,
    )


def _ticks(
    num_stages: int, num_microbatches: int, num_repeats: int, forwarding_delay: int, slack: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ticks of every forward and of every backward, int [M, V*S] each."""
    # A group must be long enough that its first microbatch is back at stage 0 when the group ends.
    sizes = group_microbatches(num_microbatches, forwarding_delay * num_stages)
    strides = np.maximum(sizes, forwarding_delay * num_stages)
    position = depth_first(sizes, strides, num_repeats)  # [M, V]
    stage = np.arange(num_stages)
    # D: the tick in which the last stage has run the last chunk of the first microbatch.
    first_backward = (num_repeats - 1) * strides.max() + forwarding_delay * (num_stages - 1) + slack
    shape = (num_microbatches, num_repeats * num_stages)
    # [M, V, 1] + [S] -> [M, V, S] -> [M, V*S]
    forward = position[:, :, None] + forwarding_delay * stage
    backward = position[:, ::-1, None] + first_backward + forwarding_delay * stage[::-1]
    return forward.reshape(shape), backward.reshape(shape)


def circular(
    num_stages: int, num_microbatches: int, num_repeats: int, forwarding_delay: int = 1
) -> Table:
    """Build the circular pipeline: all microbatches pass one chunk of every stage, then the next.

    The backward mirrors the forward in time, as differentiating the forward loop does.
    Stage s runs microbatch m of chunk c at tick c*max(M, d*S) + m + d*s. From MaxText and Praxis;
    called looped breadth-first by Lamy-Poirier, arXiv:2211.05953. For M >= d*S

        ticks      M*V + d(S-1) forward, the same backward
        bubble     d(S-1) / (M*V + d(S-1)) of the time
        in flight  M*V on every stage

    An example with S=2, M=3, V=2. Stage 0 starts chunk 2 when all microbatches have passed its
    chunk 0; microbatch 0 is back from stage 1 in tick 2 and waits one tick:

        tick    0   1   2   3   4   5   6   7   8   9   10  11  12  13
        stage 0 0F0 0F1 0F2 2F0 2F1 2F2         2B2 2B1 2B0 0B2 0B1 0B0
        stage 1     1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0
    """
    return _breadth_first("circular", num_stages, num_microbatches, num_repeats, forwarding_delay)


def gpipe(num_stages: int, num_microbatches: int, forwarding_delay: int = 1) -> Table:
    """Build GPipe, the circular pipeline with one chunk per stage; Huang et al., arXiv:1811.06965.

        ticks      M + d(S-1) forward, the same backward
        bubble     d(S-1) / (M + d(S-1)) of the time
        in flight  M on every stage

    An example with S=2, M=3:

        tick    0  1  2  3  4  5  6  7
        stage 0 F0 F1 F2       B2 B1 B0
        stage 1    F0 F1 F2 B2 B1 B0
    """
    return _breadth_first("gpipe", num_stages, num_microbatches, 1, forwarding_delay)


def _breadth_first(
    name: str, num_stages: int, num_microbatches: int, num_repeats: int, forwarding_delay: int
) -> Table:
    repeat, stage = np.divmod(np.arange(num_repeats * num_stages), num_stages)  # [V*S] each
    # A chunk of all microbatches takes M ticks, or a microbatch's way around the ring if longer.
    stride = max(num_microbatches, forwarding_delay * num_stages)
    # [M, 1] + [V*S] -> [M, V*S]
    forward = np.arange(num_microbatches)[:, None] + stride * repeat + forwarding_delay * stage
    backward = 2 * (int(forward.max()) + 1) - 1 - forward
    return from_ticks(
        name,
        num_stages,
        num_repeats,
        {"F": forward, "B": backward},
        lockstep=True,
        forwarding_delay=forwarding_delay,
    )


def throttled(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_repeats: int,
    placement: str,
    max_in_flight: int,
    splits_backward: bool,
) -> Table:
    """Build a lockstep table in which an F starts only if the stage's memory has room for it.

    There is room if afterwards the other forwards of the oldest microbatch that has any left on the
    stage still fit, so that it can pass all chunks and come back. Later chunks run first. A W runs
    in the tick of its I.

    Args:
      max_in_flight: most chunks in flight on a stage, at least `num_repeats`.
      splits_backward: whether backwards are I and W; otherwise B.
    """
    stage_of = stages_of_chunks(num_stages, num_repeats, placement).tolist()
    num_chunks, last = len(stage_of), len(stage_of) - 1
    chunks = [[c for c in range(num_chunks) if stage_of[c] == s] for s in range(num_stages)]
    forward = np.full((num_microbatches, num_chunks), -1)
    backward = np.full((num_microbatches, num_chunks), -1)
    forwards, backwards = [0] * num_chunks, [0] * num_chunks  # of each chunk, so far
    in_flight = [0] * num_stages
    tick = 0
    while min(backwards) < num_microbatches:
        # 1. F slots: the latest chunk that fits the memory and has its input.
        for stage in range(num_stages):
            room = max_in_flight - in_flight[stage]
            oldest = min(forwards[c] for c in chunks[stage])
            rest = sum(forwards[c] <= oldest for c in chunks[stage])
            for chunk in reversed(chunks[stage]):
                m = forwards[chunk]
                if m == num_microbatches or rest + (m > oldest) > room:
                    continue
                if chunk == 0 or 0 <= forward[m, chunk - 1] < tick:
                    forward[m, chunk] = tick
                    forwards[chunk] += 1
                    in_flight[stage] += 1
                    break
        # 2. Backward slots of the same tick; the last chunk may follow its own F at once.
        for stage in range(num_stages):
            for chunk in reversed(chunks[stage]):
                m = backwards[chunk]
                if m == forwards[chunk]:
                    continue
                if chunk == last or 0 <= backward[m, chunk + 1] < tick:
                    backward[m, chunk] = tick
                    backwards[chunk] += 1
                    in_flight[stage] -= 1
                    break
        tick += 1
    ticks = {"F": forward, "B": backward}
    if splits_backward:
        ticks = {"F": forward, "I": backward, "W": backward}
    return from_ticks(name, num_stages, num_repeats, ticks, placement=placement, lockstep=True)
